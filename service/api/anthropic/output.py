"""Blocks of one answer while they grow, and the events of each."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from service.api.anthropic.answers import AnswerBlock, Text, Thought, ToolUse
from service.api.openai.responses.output import Send
from service.api.openai.tools.reading import Call, Said

DEEPEST = 100
"""Levels of a call's input. Pydantic writes some 250."""

Growing = TypeVar("Growing", Text, Thought)


class Blocks:
    """Texts and reasoning grow while they are last; a call is whole at once."""

    def __init__(self, send: Send) -> None:
        self._send, self._open = send, False
        self.content: list[AnswerBlock] = []

    def add(self, said: Said) -> None:
        """A part of the answer."""
        if said.reasoning:
            self._last(Thought).thinking += said.reasoning
            self._delta("thinking_delta", thinking=said.reasoning)
        if said.text:
            self._last(Text).text += said.text
            self._delta("text_delta", text=said.text)
        for call in said.calls:
            self._call(call)

    def close(self) -> None:
        """End the block that is last, if it still grows."""
        if self._open and isinstance(thought := self.content[-1], Thought):
            self._delta("signature_delta", signature=thought.signature)
        if self._open:
            self._send("content_block_stop", index=len(self.content) - 1)
        self._open = False

    def _last(self, kind: type[Growing]) -> Growing:
        """The block that is last, begun if it is of another kind."""
        if self._open and isinstance(last := self.content[-1], kind):
            return last
        begun = kind()
        self._begin(begun, {**begun.model_dump(), **({"signature": ""} if kind is Thought else {})})
        return begun

    def _begin(self, block: AnswerBlock, shown: dict[str, Any]) -> None:
        self.close()
        self.content.append(block)
        self._open = True
        self._send("content_block_start", index=len(self.content) - 1, content_block=shown)

    def _call(self, call: Call) -> None:
        block = ToolUse(name=call.name, input=_whole(json.loads(call.arguments)))
        self._begin(block, {**block.model_dump(), "input": {}})
        self._delta("input_json_delta", partial_json=call.arguments)
        self.close()

    def _delta(self, kind: str, **fields: Any) -> None:
        self._send("content_block_delta", index=len(self.content) - 1, delta={"type": kind, **fields})


def _whole(value: Any) -> Any:
    """``value`` of JSON without half characters, which are no text. Its parts below ``DEEPEST`` are text."""
    return _shallow(json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")))


def _shallow(value: Any, depth: int = 1) -> Any:
    if depth > DEEPEST:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return {key: _shallow(inner, depth + 1) for key, inner in value.items()}
    return [_shallow(inner, depth + 1) for inner in value] if isinstance(value, list) else value
