"""Are the numbers of two results comparable? Both must have the same settings, over the same texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from service.evaluation.catalogue import IN_SWEEPS
from service.evaluation.formatting import listed
from service.evaluation.results import DocumentInfo, EvaluationResult

COMPARABLE = tuple(evaluation.name for evaluation in IN_SWEEPS)
"""Evaluations with a number per method and length."""

FREE = {
    *("evaluation", "id", "model", "trained_length", "partial", "setup", "seconds", "links"),
    *("lengths", "documents", "skipped", "methods", "position_bin"),
}
"""Fields in which results may differ, or that are compared by themselves."""


class NotComparable(ValueError):
    """Results whose numbers differ for another reason than methods and models. ``field`` is the one at fault."""

    def __init__(self, why: str, field: str = "jobs") -> None:
        super().__init__(why)
        self.field = field


class Named(NamedTuple):
    """A result and its name."""

    name: str
    result: EvaluationResult


def check(results: Sequence[Named]) -> None:
    """Raises:
    NotComparable: for one result of a single method, for other evaluations, settings or texts, and without a shared
    length.
    """
    for name, result in results:
        if result.evaluation not in COMPARABLE:
            allowed = listed(COMPARABLE)
            raise NotComparable(f"{name} is of {result.evaluation}, and comparable are those of {allowed}")
    first = results[0]
    if len(results) == 1 and len(first.result.methods) < 2:
        raise NotComparable("a comparison needs two results at least, or one of several methods")
    for other in results[1:]:
        if other.result.evaluation != first.result.evaluation:
            raise NotComparable(
                f"{first.name} is of {first.result.evaluation}, and {other.name} of {other.result.evaluation}"
            )
        _check_settings(first, other)
        _check_documents(first, other)
    if not shared_lengths(results) and len(results) == 1:
        raise NotComparable(f"{first.name} has no numbers: nothing could be measured")
    if not shared_lengths(results):
        raise NotComparable(f"{listed([named.name for named in results])} share no length")


def shared_lengths(results: Sequence[Named]) -> list[int]:
    """The lengths that all ``results`` have, ascending."""
    return sorted(set.intersection(*(set(named.result.scores().lengths()) for named in results)))


def have_one_tokenizer(a: EvaluationResult, b: EvaluationResult) -> bool:
    """True unless their setups show that tokenizers differ."""
    return a.setup is None or b.setup is None or _tokenizers(a) == _tokenizers(b)


def _tokenizers(result: EvaluationResult) -> set[str]:
    return set() if result.setup is None else {model.tokenizer for model in result.setup.models.values()}


def documents_of(result: EvaluationResult) -> list[DocumentInfo]:
    documents: list[DocumentInfo] = getattr(result, "documents", [])
    return documents


def _is_over_tokens(a: EvaluationResult, b: EvaluationResult) -> bool:
    """True if numbers compare over the same tokens alone: perplexities, and prompts of one tokenizer."""
    return a.scores().lower_is_better or have_one_tokenizer(a, b)


def _check_settings(first: Named, other: Named) -> None:
    free = FREE if _is_over_tokens(first.result, other.result) else FREE | {"bos"}
    own, others = (named.result.model_dump(mode="json", exclude=free) for named in (first, other))
    for field, a, b in _differences(own, others):
        why = f"{field} is {_shown(a)} in {first.name} and {_shown(b)} in {other.name}"
        hint = "; `evaluator` of the request names one for both" if field.startswith("evaluator.") else ""
        raise NotComparable(why + hint)


def _differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields in which ``a`` and ``b`` differ, the innermost ones."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys((*a, *b)):
            yield from _differences(a.get(name), b.get(name), f"{path}.{name}" if path else name)
    elif a != b:
        yield path, a, b


def _check_documents(first: Named, other: Named) -> None:
    over_tokens = _is_over_tokens(first.result, other.result)
    pairs = zip_longest(documents_of(first.result), documents_of(other.result))
    for number, (a, b) in enumerate(pairs, 1):
        if a is None or b is None or not _is_the_same(a, b, over_tokens):
            why = f"document {number} is {_document(a)} in {first.name} and {_document(b)} in {other.name}"
            more = "" if have_one_tokenizer(first.result, other.result) else "; perplexity compares with one tokenizer"
            raise NotComparable(f"{why}{more}")


def _is_the_same(a: DocumentInfo, b: DocumentInfo, over_tokens: bool) -> bool:
    """True if the tokens of two documents agree, or of two tokenizers the bytes, where neither is cut."""
    if over_tokens:
        hashes = {a.tokens_sha256, b.tokens_sha256} - {""}  # earlier versions had none
        return (a.tokens, a.bytes) == (b.tokens, b.bytes) and len(hashes) < 2
    return a.cut_from is not None or b.cut_from is not None or a.bytes == b.bytes


def _document(document: DocumentInfo | None) -> str:
    if document is None:
        return "absent"
    known = f", hash {document.tokens_sha256[:8]}" if document.tokens_sha256 else ""
    return f"{document.name} ({document.tokens:,} tokens{known})"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
