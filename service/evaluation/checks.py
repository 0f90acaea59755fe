"""Checks of every evaluation's request, before a token reaches the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from patches import Method
from service.evaluation.cost import Cost
from service.evaluation.documents import (
    BUILT_IN,
    Document,
    built_in,
    doubling_lengths,
    from_text,
    from_token_ids,
    mistaken,
    token_digest,
)
from service.evaluation.overlap import overlaps
from service.evaluation.request import Bos, ByLengthRequest, ByPositionRequest, DocumentsRequest
from service.evaluation.results import DocumentInfo, Overlap
from service.evaluation.scoring import pass_memory
from service.evaluation.unit import Plan, Subject
from service.inputs import is_longer, names_of
from service.models.memory.score_size import MOST_TOKENS
from service.models.policies import check_ranges
from service.models.registry import ModelRegistry, ServedModel
from service.policy.auto import Auto
from service.settings import Settings
from service.sharing.admission import largest

DEFAULT_REACH = 32
"""Default lengths stop at this many times the trained length."""


MOST_BINS = 1024
"""Of the loss by position of a method."""


class InvalidEvaluation(ValueError):
    """A request that cannot be run; ``param`` is the field at fault, and ``message`` its problem."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message if message.startswith(f"{param}[") else f"{param}: {message}")
        self.param, self.message = param, message


def subjects_of(
    methods: Sequence[Method],
    served: ServedModel,
    models: ModelRegistry,
    settings: Settings,
    *,
    longest: int,
    described_at: int | None = None,
) -> list[Subject]:
    """Every method with its model; of equal ones the first.

    The result describes encodings for ``described_at`` reserved tokens, ``longest`` when absent. A request that repeats
    the numbers of an answer is checked there.

    Raises:
        InvalidEvaluation: when there are too many, or one does not fit its model at ``longest`` tokens.
    """
    at_most("methods", len(methods), settings.max_methods)
    subjects = []
    for index, method in enumerate(methods):
        model = models.for_method(served, method)
        try:
            if isinstance(method, Auto):
                check_ranges(method.ranges or (), model, models)
            confirmed = model.patch.confirmed(method, described_at or longest)
            model.patch.resolve(confirmed, longest)
        except ValueError as error:
            raise InvalidEvaluation(f"methods.{index}", str(error)) from error
        subjects.append(Subject(confirmed, model.patch, model.name, model.engine.scores.most, model.score_room))
    return _by_name(subjects)


def _by_name(subjects: Sequence[Subject]) -> list[Subject]:
    """Of equal ones the first.

    Raises:
        InvalidEvaluation: for different ones of one name, such as ``auto`` with other ranges.
    """
    named: dict[tuple[str, str], Subject] = {}
    first: dict[Subject, int] = {}
    for index, subject in enumerate(subjects):
        first.setdefault(subject, index)
    for subject, index in first.items():
        if named.setdefault((subject.label, subject.model), subject) != subject:
            why = f"a second encoding of the name {subject.label}, which results could not distinguish: send it alone"
            raise InvalidEvaluation(f"methods.{index}", why)
    return list(first)


def documents_of(request: DocumentsRequest, served: ServedModel, settings: Settings) -> list[Document]:
    """The documents of a request, tokenized without special tokens and cut to its ``max_tokens``.

    Raises:
        InvalidEvaluation: for too many, a repeated one, a misspelt name, or token ids that the model does not have.
    """
    return _all_different(*_tokenized(request, served, settings))


def documents_by_length(
    request: ByLengthRequest, served: ServedModel, special: int, settings: Settings
) -> tuple[list[Document], list[DocumentInfo]]:
    """``documents_of`` without those that the request skips, and these.

    Raises:
        InvalidEvaluation: as ``documents_of``, and for skipping all documents, or without a longest length.
    """
    if request.short_documents == "refuse":
        return documents_of(request, served, settings), []
    least = request.least()
    if least is None:
        raise InvalidEvaluation("short_documents", f"skip needs {request.longest_field}: add it")
    documents, names = _tokenized(request, served, settings)
    fits = [len(document.token_ids) + special >= least for document in documents]
    if not any(fits):
        longest = max(len(document.token_ids) for document in documents) + special
        problem = f"skip leaves no document: the longest has {longest} tokens, and the longest length is {least}"
        raise InvalidEvaluation("short_documents", problem)
    kept = [(document, name) for document, name, fit in zip(documents, names, fits, strict=True) if fit]
    skipped = [document.info for document, fit in zip(documents, fits, strict=True) if not fit]
    return _all_different([document for document, _ in kept], [name for _, name in kept]), skipped


def _tokenized(request: DocumentsRequest, served: ServedModel, settings: Settings) -> tuple[list[Document], list[str]]:
    """Every document, and its name in errors."""
    several = request.texts()
    at_most("input", len(several), settings.max_documents)
    names, documents = names_of(request.names, len(several)), []
    for name, item in zip(names, several, strict=True):
        if isinstance(item, str) and is_longer(item, settings.max_text_bytes):
            raise InvalidEvaluation("input", _of(name, f"a text may have at most {settings.max_text_bytes} bytes"))
        if not isinstance(item, str):
            documents.append(from_token_ids(name, item, served.tokenizer))
        elif item in BUILT_IN:
            known = built_in(item, served.tokenizer)
            documents.append(known if request.names is None else replace(known, name=name))
        elif (wrong := mistaken(item)) is not None:
            raise InvalidEvaluation("input", _of(name, wrong))
        else:
            documents.append(from_text(name, item, served.tokenizer))
    tokens = min(served.vocab_size, served.patch.num_logits)  # a token without a logit has no score
    for document in documents:
        outside = next((t for t in document.token_ids if t >= tokens), None)
        if outside is not None:
            problem = f"token id {outside} is outside 0..{tokens - 1}"
            raise InvalidEvaluation("input", _of(document.name, problem))
    return [document.cut(request.max_tokens) for document in documents], names


def _all_different(documents: list[Document], names: list[str]) -> list[Document]:
    """The documents, with the text that they share. Intervals take them as independent, so repeats look certain."""
    first: dict[str, int] = {}
    for index, document in enumerate(documents):
        before = first.setdefault(token_digest(document.token_ids), index)
        if before != index:
            problem = f"{names[index]} has the same tokens as {names[before]}: send each document once"
            raise InvalidEvaluation("input", problem)
    for index, (earlier, share) in overlaps([document.token_ids for document in documents]).items():
        documents[index] = replace(documents[index], overlap=Overlap(document=earlier, share=share))
    return documents


def _of(name: str, problem: str) -> str:
    """``problem`` with the name of its document, where it has one."""
    return problem if name == "input" else f"{name}: {problem}"


def too_short(document: Document) -> InvalidEvaluation:
    """The error for a document without a token to predict."""
    return InvalidEvaluation("input", _of(document.name, "needs at least 2 tokens to score one"))


def bos_of(wanted: Bos, served: ServedModel) -> int | None:
    """The token that every window starts with, or None.

    Raises:
        InvalidEvaluation: when the request wants one and the model has none.
    """
    if wanted == "always" and served.bos_token_id is None:
        raise InvalidEvaluation("bos", "this model has no BOS token: use auto or never")
    starts = wanted == "always" or (wanted == "auto" and served.adds_bos)
    return served.bos_token_id if starts else None


def lengths_of(
    wanted: Sequence[int] | None,
    served: ServedModel,
    documents: Sequence[Document],
    special: int,
    settings: Settings,
    param: str = "lengths",
) -> list[int]:
    """Context lengths that every document has room for; doublings of the trained length where none are given.

    ``param`` is the request's field that has the longest one.

    Raises:
        InvalidEvaluation: for lengths beyond a document.
    """
    document = min(documents, key=lambda document: len(document.token_ids))
    shortest = len(document.token_ids) + special
    longest = min(shortest, served.engine.scores.most)
    if wanted is None:
        if longest < 2:
            raise too_short(document)
        lengths = doubling_lengths(served.trained_length, min(longest, DEFAULT_REACH * served.trained_length))
    else:
        lengths = sorted(set(wanted))
        if lengths[-1] > shortest:
            which = "" if document.name == "input" else f", {document.name}"
            counted = f", its {len(document.token_ids)} and the BOS before them" if special else ""
            skip = "; short_documents skip leaves shorter ones out" if len(documents) > 1 else ""
            most = f"at most {shortest} tokens{counted}{skip}"
            raise InvalidEvaluation(param, f"{lengths[-1]} is beyond the shortest document{which}: {most}")
    at_most("lengths", len(lengths), settings.max_lengths)
    return lengths


def position_bin_of(request: ByPositionRequest, longest: int) -> int | None:
    """Tokens of each bin of the loss by position, in passes of ``longest`` tokens; None for bins that double.

    Raises:
        InvalidEvaluation: for a single bin, and for so few tokens that a method would have more than ``MOST_BINS``.
    """
    most = max(longest, request.least() or 0)  # fewer lengths of a job that ended early keep its bins
    if request.position_bin is not None and request.position_bin >= most:
        raise InvalidEvaluation("position_bin", f"must be below the longest length ({most}), for two bins")
    least = -(-longest // MOST_BINS)
    if request.position_bin is not None and request.position_bin < least:
        why = f"must be at least {least}: {longest} tokens have at most {MOST_BINS} bins"
        raise InvalidEvaluation("position_bin", why)
    return request.position_bin


def server_takes(length: int, served: ServedModel, settings: Settings) -> None:
    """For prompts that are still to be written: ``affordable`` knows what passes need.

    Raises:
        InvalidEvaluation: when no pass that keeps all of ``length`` tokens ever fits.
    """
    bound = served.engine.scores.most
    most = max(bound, MOST_TOKENS)
    if length > most:
        by = bounded_by(bound, settings)
        raise InvalidEvaluation("lengths", f"{length} is beyond what this server scores: at most {most} tokens{by}")


def bounded_by(most: int, settings: Settings) -> str:
    """The cause of the bound of ``most`` tokens on a pass, in words."""
    if most < largest(settings.score_tokens or MOST_TOKENS, shared=settings.has_keys):
        cause = "the memory that weights and caches leave"
    else:
        cause = "the setting ROPEWAY_SCORE_TOKENS" + ("" if settings.score_tokens else " (unset)")
    return f" by {cause}" + (", of which one key gets three quarters" if settings.has_keys else "")


def at_most(param: str, count: int, most: int) -> None:
    """Raises:
    InvalidEvaluation: when a list has more entries than the server allows.
    """
    if count > most:
        raise InvalidEvaluation(param, f"has {count} entries and at most {most} are allowed")


def affordable(plan: Plan, settings: Settings, param: str = "lengths") -> None:
    """Units are made only after the check of the cost. ``param`` is the field to make smaller.

    Raises:
        InvalidEvaluation: for too many tokens or passes, or for a pass that never fits. Repeated units count
            repeatedly.
    """
    check_cost(plan.cost, settings, param)
    _fits_memory(plan, settings, param)


def check_cost(cost: Cost, settings: Settings, param: str = "lengths") -> None:
    """Raises:
    InvalidEvaluation: when an evaluation reads more tokens, or makes more passes, than the server allows.
    """
    for count, most, what in (
        (cost.tokens, settings.max_scored_tokens, "tokens"),
        (cost.passes, settings.max_passes, "passes"),
    ):
        if count > most:
            at_once = settings.max_scored_tokens == settings.max_tokens_at_once
            jobs = "; a job may read more (POST /jobs)" if at_once and what == "tokens" else ""
            raise InvalidEvaluation(param, f"this takes {count} {what}, and this server allows {most} a request{jobs}")


def _fits_memory(plan: Plan, settings: Settings, param: str) -> None:
    """Raises:
    InvalidEvaluation: when a pass needs more than all passes of its model may take together. The memory of the moment
        does not count: a pass waits for others.
    """
    passes = {(unit.subject, pass_memory.longest_pass(unit)): unit for unit in plan.units}
    for (subject, tokens), unit in passes.items():
        needed = pass_memory.pass_bytes(subject.patch, tokens, settings.score_chunk, unit.resolved)
        about = f"this pass needs about {needed >> 20} MB beyond the weights"
        if subject.most is not None and pass_memory.held_tokens(unit, settings.score_chunk) > subject.most:
            fits = f"at most {subject.most} tokens{bounded_by(subject.most, settings)}, and {about}"
            raise InvalidEvaluation(param, f"{tokens} is beyond what this server scores: {fits}")
        if subject.room is not None and needed > subject.room:
            room = f"weights and caches leave {subject.room >> 20} MB"
            raise InvalidEvaluation(param, f"{tokens} is beyond what this server scores: {about}, and {room}")
