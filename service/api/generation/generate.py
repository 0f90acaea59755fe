"""``POST /generate``: prompts, each under one or several encodings, side by side in one batch."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from patches import KnownFields, examples, to_shorthand
from service.api.files import json_response
from service.api.generation.bad_words import sequences
from service.api.generation.drawing import Drawing, Limited, Stopped
from service.api.generation.prepared import PreparedPrompt, Target, prepare
from service.api.generation.prompts import check_at_most, together
from service.api.generation.token_names import TokenNames
from service.api.generation.wanted import Wanted
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.quotas import set_deadline
from service.api.response_models.generation import (
    Alternative,
    GenerateResponse,
    GenerateUsage,
    PrefillProgress,
    Result,
    TextDelta,
    Timings,
    TokenLogprob,
)
from service.engine.generation import Generation
from service.engine.request import TokenLogprobs
from service.inputs import Encodings, Prompts, as_list
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

router = APIRouter(tags=["generate"], route_class=Route)

EXAMPLE: JsonDict = {
    "prompt": "The import statement",
    "pe": [to_shorthand(fields) for fields in examples()],
    "max_new_tokens": 32,
}


class PromptsUnderEncodings(KnownFields):
    """Prompts, the encodings of each, and the length of answers."""

    prompt: Prompts = Field(
        description="A text, token ids, or a list of either. An empty text needs a tokenizer that adds a BOS."
    )
    pe: Encodings = Field(
        default_factory=lambda: {"method": "default"},
        validate_default=True,
        description="The positional encoding: a short form such as `yarn:4`, an object with `method`, or the `pe` of "
        "an answer; `auto` chooses by the reserved length. Several: every prompt is answered under each of them.",
    )
    model: str | None = Field(None, description="A served model; the first one when absent.")
    max_new_tokens: Annotated[int, Field(ge=1)] = 64


class GenerateRequest(Stopped, Drawing, Limited, PromptsUnderEncodings):
    """Greedy unless ``temperature`` is above 0. The same ``seed`` draws the same noise in any company. Other batches
    round differently, so a token near a boundary may still change."""

    model_config = ConfigDict(allow_inf_nan=False, json_schema_extra={"examples": [EXAMPLE]})

    stream: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Report each token's log-probability and this many alternatives."
    )


@router.post("/generate", response_model=GenerateResponse)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Complete one or several prompts, each under its own positional encoding."""
    models: ModelRegistry = request.app.state.models
    served = models.get(body.model)
    prompts = list(enumerate(await _prepared(body, served, models, request)))
    if body.stream:

        async def stream(emit: Emit) -> None:
            await together(_result(body, *numbered, emit) for numbered in prompts)

        return event_stream(stream)
    results = await together(_result(body, *numbered, None) for numbered in prompts)
    usage = GenerateUsage(
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        completion_tokens=sum(result.usage.completion_tokens for result in results),
    )
    answer = GenerateResponse(model=served.name, results=results, usage=usage)
    return await json_response(answer, usage.completion_tokens * (1 + (body.logprobs or 0)), request)


async def _prepared(
    body: GenerateRequest, served: ServedModel, models: ModelRegistry, request: Request
) -> list[PreparedPrompt]:
    """Prompts times encodings, each with the model whose weights answer under it."""
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    check_at_most("max_new_tokens", body.max_new_tokens, settings, "max_new_tokens")
    body.check_tokens(served)
    given = as_list(body.prompt)
    methods = body.pe if isinstance(body.pe, list) else [body.pe]
    check_at_most("prompt", len(given) * len(methods), settings, "max_prompts", "prompts times encodings")
    wanted = Wanted(
        body.max_new_tokens,
        answers=1,
        stops=body.stops(),
        alternatives=body.logprobs,
        cache_salt=body.cache_salt,
        min_tokens=body.min_tokens,
        structure=body.structure(),
        bad_words=await sequences(body, served),
        with_stop=body.include_stop_str_in_output,
        most_param="max_new_tokens",
    )
    targets = [
        Target(models.for_method(served, method), method, f"pe.{index}" if isinstance(body.pe, list) else "pe")
        for index, method in enumerate(methods)
    ]
    return await prepare(request, served, targets, given, wanted)


async def _result(body: GenerateRequest, index: int, prepared: PreparedPrompt, emit: Emit | None) -> Result:
    """One prompt under one encoding; with ``emit`` its events too."""
    ids = prepared.prompt.token_ids
    names, text, sent = TokenNames(prepared.model.tokenizer), "", 0

    def progress(done: int) -> None:
        read = PrefillProgress(index=index, prompt_tokens_done=done, prompt_tokens_total=len(ids))
        if emit is not None:
            emit(read.model_dump_json(), "progress")

    steps = prepared.generate(
        0, body.sampling(logprobs=body.logprobs), on_prefill=progress if emit is not None else None
    )
    async with aclosing(steps) as pieces:
        async for piece in pieces:
            text, generation = text + piece.text, piece.generation
            if emit is not None:
                logprobs = None if body.logprobs is None else _logprobs(names, generation, sent)
                delta = TextDelta(
                    index=index, text=piece.text, token_ids=generation.token_ids[sent:], logprobs=logprobs
                )
                emit(delta.model_dump_json(exclude_none=True))
                sent = len(generation.token_ids)
    result = Result(
        index=index,
        prompt_index=prepared.index,
        model=prepared.model.name,
        text=text,
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason or "length",
        logprobs=None if body.logprobs is None else _logprobs(names, generation),
        usage=GenerateUsage(prompt_tokens=len(ids), completion_tokens=len(generation.token_ids)),
        timings=Timings(queue_s=generation.queue_s, prefill_s=generation.prefill_s, decode_s=generation.decode_s),
        pe=prepared.pe,
        auto=prepared.auto,
    )
    if emit is not None:
        emit(result.model_dump_json(exclude={"text", "token_ids"}))
    return result


def _logprobs(names: TokenNames, generation: Generation, first: int = 0) -> list[TokenLogprob]:
    """Log-probabilities of the tokens from ``first`` on."""

    def alternative(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": names(token_id), "logprob": logprob}

    def entry(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = [Alternative(**alternative(*pair)) for pair in logprobs.top]
        return TokenLogprob(**alternative(token_id, logprobs.logprob), top=top)

    return [entry(*pair) for pair in zip(generation.token_ids[first:], generation.logprobs[first:], strict=True)]
