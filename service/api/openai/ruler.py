"""``PUT /generate`` as RULER calls it, in the dialects of its ``vllm`` and ``sglang`` clients.

NVIDIA/RULER, scripts/pred/client_wrappers.py: one prompt a request, and only ``text`` is read of the answer.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag

from service.api.generation.bad_words import sequences
from service.api.generation.drawing import Stopped
from service.api.generation.prepared import PreparedPrompt, prepare
from service.api.generation.prompts import check_at_most, check_min_tokens
from service.api.generation.wanted import Wanted
from service.api.http.routing import Route
from service.api.openai.body import Body
from service.api.openai.names import named
from service.api.openai.schemas import PROMPT, ModelName, OpenAIDrawing, example
from service.policy.auto import Encoding
from service.settings import Settings

router = APIRouter(tags=["openai"], route_class=Route)

NewTokens = Annotated[int, Field(ge=1)]


class VllmRequest(Stopped, OpenAIDrawing):
    model_config = example(prompt=PROMPT, max_tokens=24, temperature=0)

    prompt: str
    max_tokens: NewTokens = 16
    model: ModelName | None = None
    pe: Encoding | None = None


class SglangSampling(Stopped, OpenAIDrawing):
    max_new_tokens: NewTokens = 128


class SglangRequest(Body):
    model_config = example(text=PROMPT, sampling_params={"max_new_tokens": 24, "temperature": 0})

    text: str
    sampling_params: SglangSampling = SglangSampling()
    model: ModelName | None = None
    pe: Encoding | None = None


def _dialect(body: Any) -> str:
    """By the field that holds the prompt; a body that is no object is refused as the first dialect."""
    is_sglang = "text" in body if isinstance(body, dict) else isinstance(body, SglangRequest)
    return "sglang" if is_sglang else "vllm"


RulerRequest = Annotated[
    Annotated[VllmRequest, Tag("vllm")] | Annotated[SglangRequest, Tag("sglang")], Discriminator(_dialect)
]


class RulerAnswer(BaseModel):
    """A list in the dialect of vLLM, one text in that of SGLang."""

    text: list[str] | str


@router.put("/generate", response_model=RulerAnswer)
async def ruler_generate(body: RulerRequest, request: Request) -> RulerAnswer:
    """Continue one prompt; the answer holds the new text only."""
    settings: Settings = request.app.state.settings
    name = named(request.app.state.models, body.model, body.pe)
    drawing: OpenAIDrawing
    if isinstance(body, VllmRequest):
        drawing, given, param, limit, max_tokens = body, body.prompt, "prompt", "max_tokens", body.max_tokens
        within = ""
    else:
        drawing, given, param = body.sampling_params, body.text, "text"
        limit, max_tokens, within = "max_new_tokens", body.sampling_params.max_new_tokens, "sampling_params."
    check_at_most(within + limit, max_tokens, settings, "max_new_tokens")
    drawing.check_tokens(name.target.model, within)
    check_min_tokens(drawing.min_tokens, max_tokens, within)
    structure = drawing.structure()
    if structure is not None:
        structure = replace(structure, param=within + structure.param)
    stops, least = drawing.stops(), drawing.min_tokens
    wanted = Wanted(max_tokens, 1, stops, param=param, min_tokens=least, structure=structure)
    wanted = replace(wanted, most_param=within + limit, with_stop=drawing.include_stop_str_in_output)
    wanted = replace(wanted, bad_words=await sequences(drawing, name.target.model, within))
    (prepared,) = await prepare(request, name.served, [name.target], [given], wanted)
    text = await _text(prepared, drawing)
    return RulerAnswer(text=[text] if isinstance(body, VllmRequest) else text)


async def _text(prepared: PreparedPrompt, drawing: OpenAIDrawing) -> str:
    async with aclosing(prepared.generate(0, drawing.sampling())) as pieces:
        return "".join([piece.text async for piece in pieces])
