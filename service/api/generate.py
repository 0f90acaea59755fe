"""``POST /generate``: prompts, each under one or several encodings, side by side in one batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from patches import Method, examples
from service.api.admission import admit, charge, log_prompts, set_deadline, upper_bound
from service.api.answers import (
    Alternative,
    GenerateResponse,
    PrefillProgress,
    Result,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from service.api.files import json_response
from service.api.prompts import check_at_most, check_logprobs, check_prompt, prompts_of, together
from service.api.routing import Route
from service.api.streaming import Emit, event_stream
from service.api.text import TextStream
from service.engine.engine import Generation
from service.engine.request import SamplingParams, TokenLogprobs
from service.inputs import Encodings, TextOrTokens, as_list
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings
from service.sharing.admission import Ticket

router = APIRouter(tags=["generate"], route_class=Route)

Stop = Annotated[str, Field(min_length=1, max_length=256)]

EXAMPLE: JsonDict = {
    "prompt": "The import statement",
    "pe": [*examples()],
    "max_new_tokens": 32,
}


class GenerateRequest(BaseModel):
    """Greedy unless ``temperature`` is above 0. The same ``seed`` gives the same text in any company."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, json_schema_extra={"examples": [EXAMPLE]})

    prompt: TextOrTokens = Field(description="A text, token ids, or a list of either.")
    pe: Encodings = Field(
        default_factory=lambda: {"method": "default"},
        validate_default=True,
        description="The positional encoding. Several: every prompt is answered under each of them.",
    )
    model: str | None = Field(None, description="A served model; the first one when absent.")
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(0.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="0 keeps all tokens.")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    timeout_s: Annotated[float, Field(ge=0.01)] | None = Field(
        None, description="Seconds until it is given up with 504; the server's maximum when absent."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="Share cached prefixes only with requests of the same API key and the same salt."
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Report each token's log-probability and this many alternatives."
    )

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.seed, self.logprobs)


@dataclass(frozen=True)
class _Job:
    """One prompt under one encoding, checked and ready for the engine."""

    index: int
    prompt_index: int
    prompt_ids: list[int]
    method: Method
    served: ServedModel
    ticket: Ticket


@router.post("/generate", response_model=GenerateResponse)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Complete one or several prompts, each under its own positional encoding."""
    models: ModelRegistry = request.app.state.models
    served = models.get(body.model)
    jobs = await _jobs(body, served, models, request)
    if body.stream:

        async def stream(emit: Emit) -> None:
            await together(_run(body, job, emit) for job in jobs)

        return event_stream(stream)
    results = await together(_run(body, job, None) for job in jobs)
    usage = Usage(
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        completion_tokens=sum(result.usage.completion_tokens for result in results),
    )
    answer = GenerateResponse(model=served.name, results=results, usage=usage)
    return await json_response(answer, usage.completion_tokens * (1 + (body.logprobs or 0)), request)


async def _run(body: GenerateRequest, job: _Job, emit: Emit | None) -> Result:
    text = TextStream(job.served.tokenizer, body.stops())
    sent = 0
    steps = job.served.engine.generate(
        job.prompt_ids,
        job.method,
        body.sampling(),
        body.max_new_tokens,
        ticket=job.ticket,
        cache_salt=body.cache_salt,
        on_prefill=None if emit is None else _progress_of(job, emit),
    )
    async with aclosing(steps) as generations:
        async for generation in generations:
            delta = text.push(generation.token_ids, final=generation.finish_reason is not None)
            if emit is not None:
                new = generation.token_ids[sent:]
                emit(TextDelta(index=job.index, text=delta, token_ids=new).model_dump_json())
                sent = len(generation.token_ids)
            if text.stopped:
                generation.finish_reason = "stop"
                break
    result = _result(job, generation, text, body)
    if emit is not None:
        emit(result.model_dump_json(exclude={"text", "token_ids"}))
    return result


def _result(job: _Job, generation: Generation, text: TextStream, body: GenerateRequest) -> Result:
    return Result(
        index=job.index,
        prompt_index=job.prompt_index,
        model=job.served.name,
        text=text.text,
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason or "length",
        logprobs=None if body.logprobs is None else _logprobs(job.served, generation),
        usage=Usage(prompt_tokens=len(job.prompt_ids), completion_tokens=len(generation.token_ids)),
        timings=Timings(queue_s=generation.queue_s, prefill_s=generation.prefill_s, decode_s=generation.decode_s),
        pe=job.served.patch.describe(job.method, len(job.prompt_ids) + body.max_new_tokens),
    )


def _logprobs(served: ServedModel, generation: Generation) -> list[TokenLogprob]:
    def alternative(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": served.tokenizer.decode([token_id]), "logprob": logprob}

    def entry(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = [Alternative(**alternative(*pair)) for pair in logprobs.top]
        return TokenLogprob(**alternative(token_id, logprobs.logprob), top=top)

    return [entry(*pair) for pair in zip(generation.token_ids, generation.logprobs, strict=True)]


async def _jobs(body: GenerateRequest, served: ServedModel, models: ModelRegistry, request: Request) -> list[_Job]:
    """Prompts times encodings, every one of them checked against its model before any work starts."""
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    check_at_most("max_new_tokens", body.max_new_tokens, settings.max_new_tokens)
    check_at_most("top_k", body.top_k, served.vocab_size)
    given = as_list(body.prompt)
    methods = body.pe if isinstance(body.pe, list) else [body.pe]
    check_at_most("prompt", len(given) * len(methods), settings.max_prompts, "prompts times encodings")
    check_logprobs("logprobs", body.logprobs, len(given) * len(methods) * body.max_new_tokens)
    pairs = [(index, method, models.for_method(served, method)) for index in range(len(given)) for method in methods]
    wanted = [
        (target.engine.generations, upper_bound(given[index], target.max_length) + body.max_new_tokens)
        for index, _, target in pairs
    ]
    tickets = await admit(request, wanted)
    log_prompts(request, given)
    prompts = [prompt.token_ids for prompt in await prompts_of(request, given, served)]
    for index, method, target in pairs:
        check_prompt(prompts[index], body.max_new_tokens, method, target)
    await charge(request, sum(len(prompts[index]) + body.max_new_tokens for index, _, _ in pairs))
    return [
        _Job(number, index, prompts[index], method, target, ticket)
        for number, ((index, method, target), ticket) in enumerate(zip(pairs, tickets, strict=True))
    ]


def _progress_of(job: _Job, emit: Emit) -> Callable[[int], None]:
    """Tells how much of a long prompt has been read, before its first token comes."""

    def report(done: int) -> None:
        read = PrefillProgress(index=job.index, prompt_tokens_done=done, prompt_tokens_total=len(job.prompt_ids))
        emit(read.model_dump_json(), "progress")

    return report
