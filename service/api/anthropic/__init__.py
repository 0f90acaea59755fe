"""Routes of Anthropic's API: ``/v1/messages``, and the count of its tokens. Conversations are those of OpenAI's."""

from __future__ import annotations

from service.api.anthropic import counting, route

ROUTERS = (route.router, counting.router)
