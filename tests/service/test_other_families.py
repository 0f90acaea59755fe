"""The engine on families with seams of their own: mixed encodings in a paged batch equal decoding without a cache."""

from __future__ import annotations

import asyncio

import pytest
import torch

from patches import encode, parse, patched
from service.engine.engine import Engine
from tests.models import OTHER_FAMILIES, VOCAB_SIZE, tiny_model
from tests.patches.test_other_families import FAMILY, REQUESTS
from tests.service.test_architectures import LIMITS, NEW, finished

LENGTHS = (50, 13, 80, 41)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
async def test_mixed_encodings_in_a_paged_batch(name: str) -> None:
    model = tiny_model(name)[1]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    with patched(model) as patch:
        # The first request extends what has an end; the second is the checkpoint's own.
        methods = [parse(fields) for fields in REQUESTS[FAMILY[name]][:4]]
        methods[1] = parse({"method": "default"})
        engine = Engine(patch, LIMITS, eos_token_ids=())
        try:
            jobs = [finished(engine, *pair) for pair in zip(prompts, methods, strict=True)]
            generations = await asyncio.gather(*jobs)
        finally:
            engine.stop(grace_s=1.0)
        for prompt, generation in zip(prompts, generations, strict=True):
            slot = patch.slots.acquire(generation.resolved)
            ids = list(prompt)
            for _ in range(NEW):
                position_ids = encode(torch.arange(len(ids)), slot)[None]
                with torch.no_grad():
                    logits = model(torch.tensor([ids]), position_ids=position_ids, use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            assert generation.token_ids == ids[len(prompt) :]
