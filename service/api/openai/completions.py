"""``POST /v1/completions``: OpenAI's legacy route, with prompt scoring as evaluation harnesses ask for it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.files import json_response
from service.api.generation.bad_words import sequences
from service.api.generation.pieces import Piece, Token
from service.api.generation.prepared import PreparedPrompt, prepare
from service.api.generation.prompts import Prompt, check_at_most, together
from service.api.generation.token_names import TokenNames
from service.api.generation.wanted import Wanted
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.openai import logprobs
from service.api.openai.answers import Completion, CompletionChoice, LegacyLogprobs, Usage
from service.api.openai.names import Named, named
from service.api.openai.schemas import CompletionRequest
from service.api.openai.token_ids import TokenIds
from service.api.openai.usage import TokensUsed
from service.api.quotas import set_deadline
from service.evaluation.scoring.token_scores import TokenScores
from service.inputs import as_list
from service.settings import Settings
from service.sharing.workers import Workers

router = APIRouter(tags=["openai"], route_class=Route)


@router.post("/v1/completions", response_model=Completion, responses={200: {"content": {"text/event-stream": {}}}})
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete one or several prompts; with `echo` and `logprobs`, score them."""
    body.check()
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    name = named(request.app.state.models, body.model, body.pe)
    given = as_list(body.prompt)
    check_at_most("max_tokens", body.max_tokens, settings, "max_new_tokens")
    body.check_tokens(name.target.model)
    check_at_most("n" if body.n > 1 else "prompt", len(given) * body.n, settings, "max_prompts", "prompts times n")
    answers = 0 if body.max_tokens == 0 or body.scores_answer else body.n
    wanted = Wanted(
        body.max_tokens,
        answers,
        body.stops(),
        scored=body.scores_prompt,
        alternatives=body.alternatives,
        copies=body.n if body.scores_prompt else 0,
        echoed=body.echo,
        add_special_tokens=body.add_special_tokens,
        min_tokens=body.min_tokens,
        keeps=body.keeps,
        cache_salt=body.cache_salt,
        structure=body.structure(),
        bad_words=await sequences(body, name.target.model),
        with_stop=body.include_stop_str_in_output,
    )
    prompts = await prepare(request, name.served, [name.target], given, wanted)
    answer = _Answer(body, name, prompts, request)
    if body.stream:
        return event_stream(answer.stream)
    whole = await answer.whole()
    return await json_response(whole, answer.shown, request)


class _Answer:
    """One request: every prompt scored on request, then answered ``n`` times."""

    def __init__(self, body: CompletionRequest, name: Named, prompts: list[PreparedPrompt], request: Request) -> None:
        settings: Settings = request.app.state.settings
        self._body, self._prompts, self._score_chunk = body, prompts, settings.score_chunk
        self._workers: Workers = request.app.state.workers
        self._names = TokenNames(name.served.tokenizer)
        self._used = TokensUsed(prompts)
        self._frame = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name.name}

    async def whole(self) -> Completion:
        per_prompt = await together(self._choices(i) for i in range(len(self._prompts)))
        choices = [choice for choices in per_prompt for choice in choices]
        return Completion(**self._frame, choices=choices, usage=self._used.usage())

    async def stream(self, emit: Emit) -> None:
        left_out: dict[str, Any] = {"choices": {"__all__": {"prompt_logprobs"}}}
        streams = self._body.streams
        if not streams.include_usage:
            left_out["usage"] = True

        def send(choice: CompletionChoice | None, usage: Usage | None) -> None:
            choices = [] if choice is None else [choice]
            chunk = Completion(**self._frame, choices=choices, usage=usage)
            emit(chunk.model_dump_json(exclude=left_out))

        async def one_prompt(position: int) -> None:
            scores = await self._scores(self._prompts[position])
            await together(one_choice(position, choice, scores) for choice in range(self._body.n))

        async def one_choice(position: int, choice: int, scores: TokenScores | None) -> None:
            prompt_ids: list[int] | None = self._prompts[position].prompt.token_ids
            ids = TokenIds()
            async with aclosing(self._pieces(position, choice, scores)) as pieces:
                async for piece in pieces:
                    if piece.text or piece.tokens or piece.finish_reason:
                        so_far = self._used.so_far(piece.generation, position)
                        shown = so_far if streams.continuous_usage_stats else None
                        part = await self._rendered(position, choice, [piece])
                        if self._body.return_token_ids:
                            part.token_ids = ids.take(piece, final=piece.finish_reason is not None)
                            part.prompt_token_ids, prompt_ids = prompt_ids, None
                        send(part, shown)

        await together(one_prompt(i) for i in range(len(self._prompts)))
        if streams.include_usage:
            send(None, self._used.usage())

    async def _choices(self, position: int) -> list[CompletionChoice]:
        scores = await self._scores(self._prompts[position])
        return await together(self._choice(position, choice, scores) for choice in range(self._body.n))

    async def _choice(self, position: int, choice: int, scores: TokenScores | None) -> CompletionChoice:
        async with aclosing(self._pieces(position, choice, scores)) as pieces:
            found = [piece async for piece in pieces]
        answer = await self._rendered(position, choice, found)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._prompts[position].prompt.token_ids
            answer.token_ids = found[-1].generation.token_ids
        if self._body.prompt_logprobs is not None:
            assert scores is not None
            ids, top = self._prompts[position].prompt.token_ids, self._body.prompt_logprobs
            write = partial(logprobs.prompt_logprobs, ids, scores, top, self._names)
            answer.prompt_logprobs = await self._workers.run_sized(len(ids) * (1 + top), write)
        return answer

    async def _scores(self, prepared: PreparedPrompt) -> TokenScores | None:
        """Scores of the prompt on request, with the one greedy token that harnesses want."""
        body = self._body
        if not body.scores_prompt:
            return None
        top = max(body.logprobs or 0, body.prompt_logprobs or 0)
        return await prepared.score(self._score_chunk, top=top, with_next=body.scores_answer)

    async def _pieces(self, position: int, choice: int, scores: TokenScores | None) -> AsyncGenerator[Piece]:
        body, prepared = self._body, self._prompts[position]
        offset = 0
        if body.echo:
            offset = len(prepared.prompt.text)
            yield Piece(prepared.prompt.text, await self._prompt_tokens(prepared.prompt, scores), None)
        if prepared.max_tokens == 0:
            yield Piece("", [], "length")
            return
        if scores is not None and scores.next_id is not None:
            entry = logprobs.row_logprobs(scores, len(scores.logprobs) - 1, body.logprobs or 0)
            steps = _once(prepared.known(scores.next_id, entry, body.sampling(), offset))
        else:
            steps = prepared.generate(choice, body.sampling(choice, body.logprobs), offset)
        async with aclosing(steps) as pieces:
            async for piece in pieces:
                if piece.finish_reason is not None:
                    self._used.add(piece.generation, position)
                yield piece

    async def _prompt_tokens(self, prompt: Prompt, scores: TokenScores | None) -> list[Token]:
        if scores is None or self._body.logprobs is None:
            return []
        top = self._body.logprobs
        write = partial(logprobs.prompt_tokens, prompt.token_ids, prompt.starts, scores, top)
        return await self._workers.run_sized(len(prompt.token_ids) * (1 + top), write)

    async def _rendered(self, position: int, choice: int, pieces: list[Piece]) -> CompletionChoice:
        shown: LegacyLogprobs | None = None
        if self._body.logprobs is not None:
            tokens = [token for piece in pieces for token in piece.tokens]
            size = len(tokens) * (1 + self._body.logprobs)
            shown = await self._workers.run_sized(size, partial(logprobs.legacy, tokens, self._names))
        finish_reason = pieces[-1].finish_reason
        return CompletionChoice(
            index=position * self._body.n + choice,
            text="".join(piece.text for piece in pieces),
            logprobs=shown,
            finish_reason=finish_reason,
            stop_reason=pieces[-1].stop_reason,
            pe=None if finish_reason is None else self._prompts[position].pe,
            auto=None if finish_reason is None else self._prompts[position].auto,
        )

    @property
    def shown(self) -> int:
        """Number of log-probabilities and token ids in the answer, about."""
        prompt = sum(each.wanted.copies * len(each.prompt.token_ids) for each in self._prompts)
        ids = sum(len(each.prompt.token_ids) for each in self._prompts) * self._body.n
        scored = (prompt + self._used.completion) * (1 + (self._body.alternatives or 0))
        return scored + ids if self._body.return_token_ids else scored


async def _once(piece: Piece) -> AsyncGenerator[Piece]:
    yield piece
