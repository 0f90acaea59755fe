"""Prompts as token ids, and the checks before any work starts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Request

from patches import Method, ResolvedRecipe
from service.api.generation.text import LONGEST, TextStream
from service.errors import bad_request, context_length_exceeded
from service.inputs import is_longer
from service.models.registry import ServedModel
from service.models.text.tokenizing import tokenized, with_ends
from service.settings import Settings
from service.sharing.stopping import check_wanted
from service.sharing.workers import Workers

T = TypeVar("T")

MOST_LOGPROBS = 1 << 18
"""Log-probabilities in one answer: some ten megabytes of JSON."""


@dataclass(frozen=True)
class Prompt:
    """Token ids; on request also their text, and the offset at which each token starts."""

    token_ids: list[int]
    text: str = ""
    starts: list[int] = field(default_factory=list)


async def prompts_of(
    request: Request,
    given: Sequence[str | list[int]],
    served: ServedModel,
    param: str = "prompt",
    *,
    add_special_tokens: bool = True,
    with_text: bool = False,
) -> list[Prompt]:
    """The prompts of the field ``param``, tokenized on a thread.

    Raises:
        ApiError: for a text that cannot be tokenized at once; QueueFull from the workers.
    """
    for item in given:
        check_text_size(item, request, param)

    def read() -> list[Prompt]:
        how = {"add_special_tokens": add_special_tokens, "with_text": with_text}
        return [read_prompt(item, served.tokenizer, **how) for item in given]

    workers: Workers = request.app.state.workers
    return await workers.run_sized(sum(map(len, given)), read)


def check_text_size(item: str | list[int], request: Request, param: str) -> None:
    """Raises:
    ApiError: for a text longer than this server tokenizes.
    """
    settings: Settings = request.app.state.settings
    if isinstance(item, str) and is_longer(item, settings.max_text_bytes):
        raise bad_request(f"{param}: a text may have at most {settings.max_text_bytes} bytes", param)


def read_prompt(
    item: str | list[int], tokenizer: Any, *, add_special_tokens: bool = True, with_text: bool = False
) -> Prompt:
    """A text is tokenized as the tokenizer does by itself; token ids are taken as they are, without BOS."""
    if isinstance(item, str) and not with_text:
        return Prompt(tokenized(tokenizer, item, add_special_tokens=add_special_tokens))
    if isinstance(item, str):
        token_ids, ends = with_ends(tokenizer, item, add_special_tokens=add_special_tokens)
        return Prompt(token_ids, item, [0, *ends][:-1])
    if not with_text:
        return Prompt(item)
    stream, starts, so_far = TextStream(tokenizer), [], []
    for token_id in item:
        check_wanted()
        starts.append(stream.end)
        so_far.append(token_id)
        stream.push(so_far, final=len(so_far) == len(item))
    return Prompt(item, stream.text, starts)


def last_tokens(prompt: Prompt, most: int, bos: int | None) -> Prompt:
    """The last ``most`` tokens of ``prompt``, its first one among them if that is ``bos``."""
    ids, starts = prompt.token_ids, prompt.starts
    if len(ids) <= most:
        return prompt
    first = min(most, 1) if ids[0] == bos else 0
    at = len(ids) - most + first
    begin = starts[at] if starts and at < len(ids) else len(prompt.text)
    kept = [0] * first + [start - begin for start in starts[at:]] if starts else []
    return Prompt(ids[:first] + ids[at:], prompt.text[begin:], kept)


def first_tokens(prompt: Prompt, most: int, tokenizer: Any) -> Prompt:
    """The first ``most`` tokens of ``prompt``. Half a character at their end is a replacement character."""
    ids, starts = prompt.token_ids[:most], prompt.starts[:most]
    if len(ids) == len(prompt.token_ids) or not starts:
        return Prompt(ids, prompt.text, starts)
    text = prompt.text[: prompt.starts[most]]
    is_whole = not tokenizer.decode(ids[-LONGEST:]).endswith("\ufffd")
    return Prompt(ids, text if is_whole else f"{text[:-1]}\ufffd", starts)


def check_at_most(
    param: str,
    asked: int,
    settings: Settings,
    setting: Literal["max_new_tokens", "max_prompts"],
    what: str | None = None,
) -> None:
    """Raises:
    ApiError: when ``asked``, which is ``what``, is more than the ``setting`` of this server gives.
    """
    most: int = getattr(settings, setting)
    if asked > most:
        limit = f"may be at most {most} on this server, by its setting ROPEWAY_{setting.upper()}"
        raise bad_request(f"{param}: {f'{what} ' if what else ''}{limit}", param)


def check_logprobs(param: str, alternatives: int | None, tokens: int) -> None:
    """Raises:
    ApiError: when an answer would hold more log-probabilities, those of alternatives included, than one may.
    """
    if alternatives is not None and tokens * (1 + alternatives) > MOST_LOGPROBS:
        message = (
            f"{tokens} tokens with {alternatives} alternatives each are more than the {MOST_LOGPROBS} of one answer"
        )
        raise bad_request(f"{param}: {message}", param)


def check_min_tokens(min_tokens: int, max_tokens: int, within: str = "") -> None:
    """``within`` precedes the name of the field in an error.

    Raises:
        ApiError: when an answer has no room for its fewest tokens.
    """
    if min_tokens > max_tokens:
        field = f"{within}min_tokens"
        raise bad_request(f"{field}: must be at most {max_tokens}, the most new tokens here", field)


def check_prompt(
    token_ids: list[int], max_new_tokens: int, method: Method, served: ServedModel, param: str, pe_param: str
) -> ResolvedRecipe:
    """The encoding as it takes effect on this prompt; they came in the fields ``pe_param`` and ``param``.

    Raises:
        ApiError: when the prompt is not of this model, does not fit, or the encoding does not fit the model.
    """
    if not token_ids:
        message = f"{param}: holds no tokens. An empty text needs special tokens that the tokenizer adds, such as BOS"
        raise bad_request(message, param)
    if max(token_ids) >= served.vocab_size:
        raise bad_request(f"{param}: token ids of this model are 0..{served.vocab_size - 1}", param)
    length = len(token_ids) + max_new_tokens
    if length > served.max_length:
        needed = f"a larger {served.bound}"
        raise context_length_exceeded(len(token_ids), max_new_tokens, served.max_length, param, needed)
    try:
        return served.patch.resolve(method, length)
    except ValueError as error:
        raise bad_request(f"{pe_param}: {error}", pe_param) from error


def check_scored(token_ids: list[int], served: ServedModel, param: str) -> None:
    """Raises:
    ApiError: for a prompt, from the field ``param``, that is too long for scores or has a token without a logit.
    """
    most, tokens = served.engine.scores.most, served.patch.num_logits
    if len(token_ids) > most:
        raise context_length_exceeded(len(token_ids), 0, most, param, "more memory or a larger ROPEWAY_SCORE_TOKENS")
    if max(token_ids[1:], default=0) >= tokens:  # the first token has no score
        raise bad_request(f"{param}: this model gives scores to token ids 0..{tokens - 1} only", param)


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all ``works``, run at once; the first failure cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
