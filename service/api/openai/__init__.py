"""Routes that existing clients use unmodified: OpenAI's, vLLM's tokenizer routes, and RULER's."""

from __future__ import annotations

from service.api.openai import chat, completions, models, ruler, tokenization
from service.api.openai.responses import counting
from service.api.openai.responses import route as responses

ROUTERS = tuple(part.router for part in (completions, chat, responses, counting, models, tokenization, ruler))
