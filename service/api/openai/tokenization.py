"""vLLM's tokenizer routes at the root: evaluation harnesses need no local tokenizer with them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field, StrictInt

from service.api.generation.prompts import check_text_size, read_prompt
from service.api.http.routing import Route
from service.api.openai.body import Body
from service.api.openai.messages import Messages
from service.api.openai.names import named
from service.api.openai.schemas import PROMPT, ModelName, example
from service.api.openai.templating import Templating
from service.api.openai.tools.offer import Offer
from service.api.openai.tools.schemas import Tools
from service.api.quotas import admit
from service.errors import bad_request
from service.inputs import MOST_TOKENS
from service.models.registry import ModelRegistry
from service.sharing.workers import Workers

router = APIRouter(tags=["openai"], route_class=Route)


class TokenizeRequest(Templating):
    model_config = example(prompt=PROMPT)

    prompt: str | None = None
    messages: Messages | None = Field(None, description="A conversation in place of `prompt`, by the chat template.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add special tokens as the tokenizer does by default, such as BOS. When absent, those that the "
        "routes of prompts and chats add.",
    )
    tools: Tools | None = Field(None, description="Functions that the template writes beside `messages`.")
    return_token_strs: bool = Field(False, description="Each token as the vocabulary spells it, too.")
    model: ModelName | None = None

    def check(self) -> None:
        """Raises:
        ApiError: for a prompt and messages, or neither.
        """
        if self.prompt is None and self.messages is None:
            raise bad_request("prompt: required without messages", "prompt")
        if self.prompt is not None and self.messages is not None:
            raise bad_request("messages: not beside prompt", "messages")
        asked = {
            "add_generation_prompt": self.add_generation_prompt is False,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": bool(self.chat_template_kwargs),
            "tools": bool(self.tools),
        }
        for field, is_asked in asked.items():
            if is_asked and self.messages is None:
                raise bad_request(f"{field}: only with messages", field)


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model_config = example(tokens=[40, 41, 42])

    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=MOST_TOKENS, fail_fast=True)]
    model: ModelName | None = None


class Text(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation by the model's chat template."""
    body.check()
    name = named(request.app.state.models, body.model)
    await admit(request, [])
    served = name.served
    if body.messages is None:
        text, param, special = body.prompt or "", "prompt", body.add_special_tokens is not False
    else:
        messages = [message.for_template() for message in body.messages]
        tools = Offer.of([tool.function for tool in body.tools or []], None, several=True).for_template()
        text = await run_in_threadpool(body.templated, messages, served, "messages", tools)
        param, special = "messages", body.special_tokens(served)
    check_text_size(text, request, param)

    def written() -> str:
        """The answer. Millions of token ids wait for no other thread: each takes 50 bytes until it is written."""
        ids = read_prompt(text, served.tokenizer, add_special_tokens=special).token_ids
        spelt = served.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        longest = name.target.model.max_length
        return Tokens(tokens=ids, count=len(ids), max_model_len=longest, token_strs=spelt).model_dump_json()

    workers: Workers = request.app.state.workers
    return Response(await workers.run_sized(len(text), written), media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """Text of token ids, special tokens included."""
    served = named(request.app.state.models, body.model).served
    await admit(request, [])
    if body.tokens and max(body.tokens) >= served.vocab_size:
        raise bad_request(f"tokens: token ids of this model are 0..{served.vocab_size - 1}", "tokens")
    workers: Workers = request.app.state.workers
    return Text(prompt=await workers.run_sized(len(body.tokens), lambda: str(served.tokenizer.decode(body.tokens))))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: ModelName | None = None) -> TokenizerInfo:
    """The tokenizer, for clients that prepare prompts themselves. Without a model, all served ones have the same."""
    models: ModelRegistry = request.app.state.models
    different = {id(served.tokenizer): served for served in models}.values()  # adapters have that of their base
    if model is None and len(await run_in_threadpool(lambda: {served.tokenizer_hash for served in different})) > 1:
        message = "model: the served models have several tokenizers; name one: /tokenizer_info?model=NAME"
        raise bad_request(f"{message}. For lm-eval, add tokenizer=FOLDER,tokenizer_backend=huggingface", "model")
    name = named(models, model)
    tokenizer = name.served.tokenizer
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=name.served.vocab_size,
        max_model_len=name.target.model.max_length,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        unk_token=tokenizer.unk_token,
        add_bos_token=name.served.adds_bos,
        chat_template=tokenizer.chat_template,
    )
