"""Routes that existing clients use unmodified: OpenAI's, vLLM's tokenizer routes, and RULER's."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.openai import chat, completions, models, ruler, tokenization

router = APIRouter(tags=["openai"])
for part in (completions, chat, models, tokenization, ruler):
    router.include_router(part.router)
