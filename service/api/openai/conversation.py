"""Conversations as prompts: one text by the chat template, checked and admitted like any other prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from service.api.generation.bad_words import sequences
from service.api.generation.pieces import Piece
from service.api.generation.prepared import PreparedPrompt, prepare
from service.api.generation.prompts import check_at_most
from service.api.generation.structure import Structure
from service.api.generation.wanted import Wanted
from service.api.openai.answers import ChatFinishReason
from service.api.openai.names import Named, named
from service.api.openai.schemas import ConversationBody
from service.api.openai.shortening import prompt_of
from service.api.openai.tools.offer import Offer
from service.api.openai.tools.reading import Reader, Said
from service.api.quotas import set_deadline
from service.engine.request import SamplingParams
from service.errors import bad_request
from service.models.registry import ServedModel
from service.models.text.response_templates import Thought, shows_special_tokens
from service.settings import Settings


class Part(NamedTuple):
    """An answer's part from one step; ``reasoning`` counts the answer's tokens of reasoning so far."""

    piece: Piece
    said: Said
    reasoning: int
    finish_reason: ChatFinishReason | None


@dataclass(frozen=True)
class Conversation:
    """The model that a request names, the prompt that its conversation is, its ``offer``, and a reader per answer."""

    name: Named
    prepared: PreparedPrompt
    offer: Offer
    readers: list[Reader]

    async def parts(self, answer: int, sampling: SamplingParams) -> AsyncGenerator[Part]:
        """Parts of one answer, the last of them with a finish reason. A call ends it if only one may come."""
        has_called, reasoning, unsaid = False, 0, 0
        async with aclosing(self.prepared.generate(answer, sampling)) as pieces:
            async for piece in pieces:
                said = self.readers[answer].take(piece.text, final=piece.finish_reason is not None)
                if not self.offer.several:
                    said = replace(said, calls=said.calls[:1])
                has_called = has_called or bool(said.calls)
                unsaid += len(piece.tokens)  # a reader holds back a text that may begin a delimiter
                if said.reasoning:
                    reasoning += unsaid
                if said.reasoning or said.text or said.calls:
                    unsaid = 0
                finish_reason: ChatFinishReason | None = piece.finish_reason
                if has_called and (finish_reason == "stop" or not (self.offer.several or finish_reason)):
                    finish_reason = "tool_calls"
                yield Part(piece, said, reasoning, finish_reason)
                if finish_reason is not None:
                    break


async def prepared_conversation(body: ConversationBody, request: Request) -> Conversation:
    """The conversation of ``body``, checked and admitted.

    Raises:
        ApiError: as ``prepare``, and for a template that refuses the messages.
    """
    settings: Settings = request.app.state.settings
    set_deadline(body.timeout_s, settings)
    name = named(request.app.state.models, body.model, body.pe)
    field, most = body.most_tokens
    check_at_most(field, most or 1, settings, "max_new_tokens")
    check_at_most("n", body.answers, settings, "max_prompts")
    body.check_tokens(name.target.model)
    offer = body.offer
    offer.check(name.served)
    if offer.decides and body.ignore_eos:
        raise bad_request("ignore_eos: not with tools, since nothing follows a call", "ignore_eos")
    prompt, text = await prompt_of(body, request, name)
    form = body.structure()

    def structured() -> tuple[Thought | None, Structure | None]:
        thought = offer.thought(form, name.served, text)
        return thought, offer.formed(form, name.served, thought)

    thought, structure = await run_in_threadpool(structured)
    wanted = _wanted(body, name.served, structure, offer)
    wanted = replace(wanted, bad_words=await sequences(body, name.target.model))
    (prepared,) = await prepare(request, name.served, [name.target], [prompt], wanted)

    def reader() -> Reader:
        return offer.reader(name.served, text, thought, is_formed=form is not None)

    readers = await run_in_threadpool(lambda: [reader() for _ in range(body.answers)])
    return Conversation(name, prepared, offer, readers)


def _wanted(body: ConversationBody, served: ServedModel, structure: Structure | None, offer: Offer) -> Wanted:
    """The demands of ``body``, whose answers follow ``structure``."""
    field, most = body.most_tokens
    return Wanted(
        most,
        body.answers,
        body.stops(),
        param=body.PARAM,
        alternatives=body.alternatives,
        logprobs_param=body.LOGPROBS_PARAM,
        add_special_tokens=body.special_tokens(served),
        min_tokens=body.min_tokens,
        keeps=body.keeps,
        cache_salt=body.cache_salt,
        structure=structure,
        with_special_tokens=offer.decides or shows_special_tokens(served.tokenizer),
        with_stop=body.include_stop_str_in_output,
        most_param=field,
    )
