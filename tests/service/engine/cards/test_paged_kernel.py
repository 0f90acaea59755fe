"""The engine on the Triton kernel, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from patches import parse, patched
from service.engine.choice import EngineChoice
from service.engine.verification import verify
from tests.kernels import device_of_kernels
from tests.models import demo_model, tiny_model
from tests.service.engine.adapter.test_paged_attention import SEGMENTS, every_encoding, generated, prompts_for

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = device_of_kernels()
TRITON = EngineChoice(attention="triton")


FAMILIES = ["llama", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "gemma2", "bloom"]
"""The interpreter takes half a minute for each."""


@pytest.mark.parametrize("family", FAMILIES if DEVICE.type == "cuda" else FAMILIES[:2])
def test_a_batch_of_every_encoding_has_the_same_tokens(family: str) -> None:
    with patched(tiny_model(family)[1].to(DEVICE)) as patch:
        methods = every_encoding(patch)
        prompts = prompts_for(methods, 40)
        tokens, values, _ = generated(patch, TRITON, methods, prompts)
        expected, expected_values, _ = generated(patch, SEGMENTS, methods, prompts)
    assert tokens == expected
    assert torch.allclose(values, expected_values, atol=1e-3)


def test_pages_out_of_reach_leave_gaps() -> None:
    streaming = parse({"method": "streaming", "sink_tokens": 5, "window": 11})
    methods = [streaming, parse({"method": "default"})]
    with patched(tiny_model("llama")[1].to(DEVICE)) as patch:
        prompts = [prompt * 20 for prompt in prompts_for(methods, 4, seed=3)]
        tokens, _, _ = generated(patch, TRITON, methods, prompts)
        assert tokens == generated(patch, SEGMENTS, methods, prompts)[0]


def test_a_request_alone_has_the_tokens_that_it_has_in_a_crowd() -> None:
    with patched(tiny_model("llama")[1].to(DEVICE)) as patch:
        methods = every_encoding(patch)[:3]
        prompts = prompts_for(methods, 40, seed=5)
        together, _, _ = generated(patch, TRITON, methods, prompts)
        alone = [
            generated(patch, TRITON, [method], [prompt])[0][0] for method, prompt in zip(methods, prompts, strict=True)
        ]
    assert alone == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_check_before_serving_takes_the_kernel(dtype: torch.dtype) -> None:
    with patched(tiny_model("llama")[1].to(DEVICE, dtype)) as patch:
        assert verify(patch, "triton", graphs=False) == TRITON


def test_an_encoding_without_a_row_keeps_the_other_attention() -> None:
    with patched(demo_model("shaw").to(DEVICE)) as patch:
        assert verify(patch, "triton").attention == "segments"
