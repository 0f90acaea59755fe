"""Prompts between a request and the engine: memory reserved, then tokenized, checked, resolved and counted.

Every route that generates takes this way, so that all of them refuse the same things in the same order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from patches import Method, ResolvedRecipe
from service.api.encodings.auto import choice_of, with_ranges
from service.api.generation.pieces import Piece, Pieces
from service.api.generation.prompts import (
    Prompt,
    check_logprobs,
    check_min_tokens,
    check_prompt,
    check_scored,
    first_tokens,
    last_tokens,
    prompts_of,
)
from service.api.generation.refusals import refused
from service.api.generation.room import Room, longest
from service.api.generation.structure import Structure
from service.api.generation.text import TextStream
from service.api.generation.wanted import Kept, Wanted
from service.api.quotas import Reserved, admit, log_prompts, rate_of, upper_bound
from service.api.response_models.encodings import AutoChoice
from service.engine.generation import Generation
from service.engine.request import Grammar, SamplingParams, TokenLogprobs
from service.evaluation.scoring.token_scores import TokenScores, prompt_scores
from service.models.registry import ServedModel
from service.models.text.grammar_parts import Delimiter
from service.models.text.grammar_text import GrammarRefused, tried
from service.settings import Settings
from service.sharing.admission import Ticket
from service.sharing.workers import Workers


class Target(NamedTuple):
    """An encoding, the served model whose weights answer under it, and the field that it came in."""

    model: ServedModel
    method: Method
    param: str = "pe"


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt under one encoding, checked and admitted: a ticket per generation, and one for scoring.

    ``index`` is the prompt's place in the request. ``resolved`` is the encoding for the reserved ``length``: the prompt
    with all new tokens that the request may have. ``max_tokens`` are those that its API key has now. ``auto`` is the
    choice of ``auto``, where the request asked for it. Answers follow ``grammars``, one each, and their tokens are no
    longer ``reserved``.
    """

    index: int
    prompt: Prompt
    model: ServedModel
    method: Method
    resolved: ResolvedRecipe
    length: int
    max_tokens: int
    auto: AutoChoice | None
    wanted: Wanted
    tickets: list[Ticket]
    score_ticket: Ticket | None
    grammars: list[Grammar]
    reserved: Reserved

    @cached_property
    def pe(self) -> dict[str, Any]:
        """The encoding as it takes effect, for the answer."""
        return self.model.patch.describe(self.method, self.length)

    async def generate(
        self,
        answer: int,
        sampling: SamplingParams,
        offset: int = 0,
        on_prefill: Callable[[int], object] | None = None,
    ) -> AsyncGenerator[Piece]:
        """Pieces of one answer, the last of them with a finish reason. ``offset`` is where its text begins.

        ``on_prefill`` gets the prompt tokens done, between the chunks of a long prompt.

        Raises:
            ApiError: when the answer cannot go on by its grammar.
        """
        pieces, drawn = self._pieces(sampling, offset), 0
        steps = self.model.engine.generate(
            self.prompt.token_ids,
            self.resolved,
            self._sampling(answer, sampling),
            self.max_tokens,
            pe_method=self.method.method,
            ticket=self.tickets[answer],
            cache_salt=self.wanted.cache_salt,
            on_prefill=on_prefill,
        )
        with refused(self.wanted.structure):
            async with aclosing(steps) as generations:
                async for generation in generations:
                    self.reserved.tokens -= len(generation.token_ids) - drawn
                    drawn = len(generation.token_ids)
                    piece = pieces.take(generation)
                    if piece.finish_reason is not None:
                        generation.finish_reason = piece.finish_reason  # a stop string counts in the metrics too
                    yield piece
                    if piece.finish_reason is not None:
                        break

    def _sampling(self, answer: int, sampling: SamplingParams) -> SamplingParams:
        """``sampling`` with the parts that depend on the model."""
        grammar, words = self.grammars[answer] if self.grammars else None, self.wanted.bad_words
        return replace(sampling, grammar=grammar, bad_words=words) if grammar or words else sampling

    async def score(self, chunk: int | None, *, top: int, with_next: bool) -> TokenScores:
        """Scores of the prompt's tokens, in chunks of at most ``chunk`` tokens, with ``top`` alternatives each.

        ``with_next`` adds the most likely token after the prompt.
        """
        ids = self.prompt.token_ids
        work = prompt_scores(self.model.patch, self.resolved, ids, chunk, top=top, with_next=with_next)
        scores: TokenScores = await self.model.engine.score(
            work, len(ids), lambda _: None, scored={self.method.method: len(ids)}, ticket=self.score_ticket
        )
        return scores

    def known(self, token_id: int, logprobs: TokenLogprobs, sampling: SamplingParams, offset: int) -> Piece:
        """An answer of one token that scoring has found already."""
        self.reserved.tokens -= 1
        ends = token_id in sampling.ends_at(self.model.engine.eos_token_ids)
        pieces = self._pieces(sampling, offset)
        return pieces.take(Generation([token_id], [logprobs], "stop" if ends else "length"))

    def _pieces(self, sampling: SamplingParams, offset: int) -> Pieces:
        tokenizer, context, least = self.model.tokenizer, self.prompt.token_ids, sampling.min_tokens
        how = {"with_special_tokens": self.wanted.with_special_tokens, "with_stop": self.wanted.with_stop}
        text, ends = TextStream(tokenizer, self.wanted.stops, least, context, **how), self.model.engine.eos_token_ids
        silent = ends if self.wanted.with_stop else sampling.ends_at(ends)
        return Pieces(text, offset, silent, sampling.stop_tokens(ends))


async def prepare(
    request: Request, served: ServedModel, targets: Sequence[Target], given: Sequence[str | list[int]], wanted: Wanted
) -> list[PreparedPrompt]:
    """Every prompt under every target, prompt by prompt, tokenized by ``served``. All refusals happen here, before a
    stream opens.

    Raises:
        ApiError, QueueFull: from admission and from the checks of prompts.
        CannotGenerate: when a target is only scored.
    """
    settings: Settings = request.app.state.settings
    targets = await _ranged(request, served, targets, wanted)
    most_new = settings.max_new_tokens if wanted.max_tokens is None else wanted.max_tokens
    pairs = [(index, target) for index in range(len(given)) for target in targets]
    tickets = await _tickets(request, pairs, given, wanted, most_new)
    log_prompts(request, given)
    how = {"add_special_tokens": wanted.add_special_tokens, "with_text": wanted.echoed}
    prompts = await prompts_of(request, given, served, wanted.param, **how)
    if wanted.keeps is not None:
        room = Room.of(targets[0].model, targets[0].method, wanted.max_tokens, settings)
        prompts = [kept(prompt, wanted.keeps, room, served.tokenizer) for prompt in prompts]
    read = sum(len(prompts[index].token_ids) for index, _ in pairs)
    answers = len(pairs) * wanted.answers
    rate = rate_of(request)
    of_minute = left = rate.most - read
    if wanted.max_tokens is None:
        most_new = min(most_new, of_minute // answers)
        left = await rate.left(read)
    forms = {model.name: await _tried(request, model, wanted.structure) for model, *_ in targets}
    prepared, reserved = list[PreparedPrompt](), Reserved(request)
    for (index, (model, method, pe_param)), own_tickets in zip(pairs, tickets, strict=True):
        tokens = len(prompts[index].token_ids)
        max_tokens = max(1, min(most_new, longest(model, method) - tokens)) if wanted.max_tokens is None else most_new
        check_min_tokens(wanted.min_tokens, max_tokens)
        resolved = check_prompt(prompts[index].token_ids, max_tokens, method, model, wanted.param, pe_param)
        if wanted.scored:
            check_scored(prompts[index].token_ids, model, wanted.param)
        length = tokens + max_tokens
        if wanted.max_tokens is None:
            max_tokens = min(max_tokens, max(left // answers, wanted.min_tokens, 1))
        chosen = method.at(length), resolved, length, max_tokens, choice_of(method, length, model, request)
        own = *own_tickets, await _grammars(request, model, wanted, forms[model.name])
        prepared.append(PreparedPrompt(index, prompts[index], model, *chosen, wanted, *own, reserved))
    await _charge(reserved, prepared, wanted, wanted.param if of_minute < answers else wanted.most_param)
    return prepared


async def _ranged(request: Request, served: ServedModel, targets: Sequence[Target], wanted: Wanted) -> list[Target]:
    """The targets, with the ranges of ``auto``.

    Raises:
        CannotGenerate: when one that must answer is only scored.
    """
    if wanted.answers:
        for target in targets:
            target.model.check_generates()
    methods = await with_ranges([target.method for target in targets], served, request)
    return [target._replace(method=method) for target, method in zip(targets, methods, strict=True)]


def kept(prompt: Prompt, keeps: Kept, room: Room, tokenizer: Any) -> Prompt:
    """The tokens that ``prompt`` keeps, as many as have ``room`` if their number is below 0. A BOS stays first."""
    if keeps.tokens < 0 and len(prompt.token_ids) <= room.whole:
        return prompt
    most = max(1, room.short) if keeps.tokens < 0 else keeps.tokens
    if keeps.side == "right":
        return first_tokens(prompt, most, tokenizer)
    return last_tokens(prompt, most, tokenizer.bos_token_id)


async def _tickets(
    request: Request,
    pairs: Sequence[tuple[int, Target]],
    given: Sequence[str | list[int]],
    wanted: Wanted,
    most_new: int,
) -> list[tuple[list[Ticket], Ticket | None]]:
    """Tickets of each pair of a prompt and a target: one per answer, and one for scoring.

    Raises:
        ApiError, QueueFull: from admission.
    """
    bounds = [(target.model.engine, upper_bound(given[index], target.model.max_length)) for index, target in pairs]
    places = [(engine.generations, bound + most_new) for engine, bound in bounds for _ in range(wanted.answers)]
    scores = [(engine.scores, bound) for engine, bound in bounds if wanted.scored]
    tickets = await admit(request, [*places, *scores], max(1, len(places) * (wanted.max_tokens or 0)))
    of_scores: list[Ticket | None] = [*tickets[len(places) :]] if wanted.scored else [None] * len(pairs)
    return [
        (tickets[number * wanted.answers : (number + 1) * wanted.answers], of_score)
        for number, of_score in enumerate(of_scores)
    ]


async def _charge(reserved: Reserved, prepared: Sequence[PreparedPrompt], wanted: Wanted, at_fault: str) -> None:
    """Count the tokens of all prompts and answers.

    Raises:
        ApiError: for too many log-probabilities, or a key without so many tokens, by the field ``at_fault``.
    """
    sizes = [(len(part.prompt.token_ids), wanted.answers * part.max_tokens) for part in prepared]
    check_logprobs(
        wanted.logprobs_param, wanted.alternatives, sum(wanted.copies * prompt + new for prompt, new in sizes)
    )
    await reserved.charge(sum(prompt for prompt, _ in sizes), sum(new for _, new in sizes), at_fault)


async def _tried(request: Request, model: ServedModel, structure: Structure | None) -> str | None:
    """The text of a grammar. A child process has compiled it, lately or now, with delimiters that need no model.

    Raises:
        ApiError: when it cannot.
    """
    if structure is None:
        return None
    workers: Workers = request.app.state.workers
    with refused(structure):
        text = await run_in_threadpool(structure.build, Delimiter)
        if not model.grammars.is_tried(text):
            if problem := await workers.render(tried, text, structure.lead):
                raise GrammarRefused(problem)
            model.grammars.passed(text)
        return await workers.run(structure.build, model.grammars.delimiter)


async def _grammars(request: Request, model: ServedModel, wanted: Wanted, text: str | None) -> list[Grammar]:
    """A grammar for each answer to a prompt, compiled for the tokens of ``model`` from ``text``.

    Raises:
        ApiError: when the model cannot follow it.
    """
    if wanted.structure is None or text is None:
        return []
    workers: Workers = request.app.state.workers
    with refused(wanted.structure):
        return await workers.run(lambda: [model.grammars.compiled(text) for _ in range(wanted.answers)])
