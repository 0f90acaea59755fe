"""From a request to a plan: everything is checked here, before a token reaches the model."""

from __future__ import annotations

from collections.abc import Sequence

from service.evaluation.documents import BUILT_IN, Document, built_in, doubling_lengths, from_text, from_token_ids
from service.evaluation.perplexity import Plan, Subject
from service.evaluation.request import PerplexityRequest
from service.inputs import as_list
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

DEFAULT_STRIDE = 256
DEFAULT_TAIL = 256
DEFAULT_REACH = 32
"""Default lengths stop at this many times the trained length."""


class InvalidEvaluation(ValueError):
    """A request that cannot be run; ``param`` is the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def plan_of(request: PerplexityRequest, models: ModelRegistry, settings: Settings) -> tuple[Plan, list[Subject]]:
    """The plan and its subjects.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    _at_most("methods", len(request.methods), settings.max_methods)
    documents = _documents(request, served, settings)
    bos = _bos(request, served)
    special = 0 if bos is None else 1
    lengths = _lengths(request, served, documents, special)
    _at_most("lengths", len(lengths), settings.max_lengths)
    tail = request.tail or min(DEFAULT_TAIL, lengths[0] - 1)
    if tail >= lengths[0]:
        raise InvalidEvaluation("tail", f"must be below the shortest length ({lengths[0]})")
    plan = Plan(
        model=served.name,
        trained_length=served.trained_length,
        documents=documents,
        lengths=lengths,
        protocol=request.protocol,
        stride=request.stride or (lengths[-1] if request.protocol == "tail" else _default_stride(lengths[0] - special)),
        tail=tail,
        bos=bos,
        chunk=settings.score_chunk,
    )
    if request.protocol == "sliding" and plan.stride > lengths[0] - special:
        raise InvalidEvaluation("stride", f"must be at most {lengths[0] - special}: a larger one would skip tokens")
    subjects = _subjects(request, served, models, plan)
    work = sum(subject.tokens for subject in subjects)
    if work > settings.max_scored_tokens:
        most = settings.max_scored_tokens
        raise InvalidEvaluation("lengths", f"the passes would read {work} tokens; this server allows {most} a request")
    return plan, subjects


def _default_stride(room: int) -> int:
    return min(DEFAULT_STRIDE, room)


def _subjects(request: PerplexityRequest, served: ServedModel, models: ModelRegistry, plan: Plan) -> list[Subject]:
    subjects = []
    for index, method in enumerate(request.methods):
        model = models.for_method(served, method)
        try:
            model.patch.resolve(method, plan.lengths[-1])
        except ValueError as error:
            raise InvalidEvaluation(f"methods.{index}", str(error)) from error
        subjects.append(Subject(method, model.patch, model.name, plan.tokens(method, model.patch)))
    return subjects


def _documents(request: PerplexityRequest, served: ServedModel, settings: Settings) -> list[Document]:
    given = as_list(request.input)
    _at_most("input", len(given), settings.max_documents)
    documents = []
    for index, item in enumerate(given):
        name = f"input[{index}]" if len(given) > 1 else "input"
        if not isinstance(item, str):
            documents.append(from_token_ids(name, item, served.tokenizer))
        elif item in BUILT_IN:
            documents.append(built_in(item, served.tokenizer))
        else:
            documents.append(from_text(name, item, served.tokenizer))
    for document in documents:
        outside = next((t for t in document.token_ids if t >= served.vocab_size), None)
        if outside is not None:
            raise InvalidEvaluation("input", f"token id {outside} is outside 0..{served.vocab_size - 1}")
    return documents


def _bos(request: PerplexityRequest, served: ServedModel) -> int | None:
    if request.bos == "always" and served.bos_token_id is None:
        raise InvalidEvaluation("bos", "this model has no BOS token: use auto or never")
    wanted = request.bos == "always" or (request.bos == "auto" and served.adds_bos)
    return served.bos_token_id if wanted else None


def _lengths(request: PerplexityRequest, served: ServedModel, documents: Sequence[Document], special: int) -> list[int]:
    shortest = min(len(document.token_ids) for document in documents) + special
    longest = min(shortest, served.engine.limits.score_tokens)
    lengths = request.length_values()
    if lengths is None:
        if longest < 2:
            raise InvalidEvaluation("input", "needs at least 2 tokens to score one")
        return doubling_lengths(served.trained_length, min(longest, DEFAULT_REACH * served.trained_length))
    if lengths[-1] > shortest:
        raise InvalidEvaluation("lengths", f"{lengths[-1]} is beyond the shortest document: at most {shortest}")
    if lengths[-1] > longest:
        raise InvalidEvaluation("lengths", f"{lengths[-1]} is beyond what this server scores: at most {longest}")
    return lengths


def _at_most(param: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidEvaluation(param, f"has {count} entries and at most {most} are allowed")
