"""A generation of an engine without HTTP, to its end."""

from __future__ import annotations

from patches import Method, parse
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.request import SamplingParams

DEFAULT = parse({"method": "default"})
GREEDY = SamplingParams()


async def finished(
    engine: Engine, prompt: list[int], new: int, method: Method = DEFAULT, sampling: SamplingParams = GREEDY
) -> Generation:
    """The answer of ``new`` tokens to a prompt of token ids."""
    resolved = engine.patch.resolve(method, len(prompt) + new)
    async for generation in engine.generate(prompt, resolved, sampling, new, pe_method=method.method):
        last = generation
    return last
