"""Items of one response while they grow, and the events of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from service.api.openai.answers import ChatToken
from service.api.openai.responses.items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Status,
)
from service.api.openai.tools.reading import Call, Said


class Send(Protocol):
    """Takes an event: its kind, and its fields."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class Items:
    """Messages and reasoning grow while they are last; a call is whole at once."""

    def __init__(self, send: Send) -> None:
        self._send, self._items = send, list[OutputItem]()
        self._open: OutputMessage | OutputReasoning | None = None

    def open_message(self) -> OutputMessage:
        """The message that is last, begun if it is not."""
        if not isinstance(self._open, OutputMessage):
            self._close("completed")
            self._begin(OutputMessage(status="in_progress", content=[OutputText()]))
        assert isinstance(self._open, OutputMessage)
        return self._open

    def add(self, said: Said, logprobs: Sequence[ChatToken] = ()) -> None:
        """A part of the answer, with ``logprobs`` of its text. Behind a text they may come alone."""
        if said.reasoning:
            reasoning = self._open_reasoning()
            reasoning.content[0].text += said.reasoning
            self._send("reasoning_text.delta", **self._place(reasoning), delta=said.reasoning)
        if said.text or (logprobs and isinstance(self._open, OutputMessage)):
            message = self.open_message()
            message.content[0].text += said.text
            message.content[0].logprobs.extend(logprobs)
            shown = [token.model_dump() for token in logprobs]
            self._send("output_text.delta", **self._place(message), delta=said.text, logprobs=shown)
        for call in said.calls:
            self._close("completed")
            self._call(call)

    def closed(self, status: Status) -> list[OutputItem]:
        """All items at the end of the answer, one at least."""
        if not self._items:
            self.open_message()
        self._close(status)
        return self._items

    def _open_reasoning(self) -> OutputReasoning:
        if not isinstance(self._open, OutputReasoning):
            self._close("completed")
            self._begin(OutputReasoning(status="in_progress", content=[ReasoningText(text="")]))
        assert isinstance(self._open, OutputReasoning)
        return self._open

    def _begin(self, item: OutputMessage | OutputReasoning) -> None:
        self._items.append(item)
        self._open = item
        self._send("output_item.added", output_index=self._last, item={**item.model_dump(), "content": []})
        self._send("content_part.added", **self._place(item), part=item.content[0].model_dump())

    def _close(self, status: Status) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        text = {"text": item.content[0].text}
        if isinstance(item, OutputMessage):
            shown = [token.model_dump() for token in item.content[0].logprobs]
            self._send("output_text.done", **self._place(item), **text, logprobs=shown)
        else:
            self._send("reasoning_text.done", **self._place(item), **text)
        self._send("content_part.done", **self._place(item), part=item.content[0].model_dump())
        self._send("output_item.done", output_index=self._last, item=item.model_dump())

    def _call(self, call: Call) -> None:
        item = OutputCall(status="completed", name=call.name, arguments=call.arguments)
        self._items.append(item)
        begun = {**item.model_dump(), "status": "in_progress", "arguments": ""}
        place = {"item_id": item.id, "output_index": self._last}
        self._send("output_item.added", output_index=self._last, item=begun)
        self._send("function_call_arguments.delta", **place, delta=call.arguments)
        self._send("function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        self._send("output_item.done", output_index=self._last, item=item.model_dump())

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _place(self, item: OutputMessage | OutputReasoning) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": self._last, "content_index": 0}
