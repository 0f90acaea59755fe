"""A ceiling on request bodies, checked before anything is parsed."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, answer


class BodyLimit:
    """Answers 413 to bodies over ``most_bytes``, declared or sent."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_large = ApiError(413, f"the body may have at most {self.most_bytes} bytes", code="body_too_large")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.most_bytes:
            await answer(too_large)(scope, receive, send)
            return
        received, refused = 0, False

        async def counted() -> Message:
            nonlocal received, refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most_bytes:
                refused = True
                raise too_large
            return message

        async def answered(message: Message) -> None:
            # Whatever the application makes of the interrupted body, the client hears why.
            if not refused:
                await send(message)
            elif message["type"] == "http.response.start":
                await answer(too_large)(scope, receive, send)

        await self.app(scope, counted, answered)
