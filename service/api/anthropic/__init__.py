"""Routes of Anthropic's API: ``/v1/messages``, the count of its tokens, and ``/v1/models``.

Conversations and names of models are those of OpenAI's routes.
"""

from __future__ import annotations

from service.api.anthropic import counting, models, route

ROUTERS = (route.router, counting.router, models.router)
