"""docs/architectures.md: what is carried and what is refused, measured on the tiny models of the tests.

``python -m tests.architectures`` writes it; a test compares.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from patches import Patched, UnsupportedModel, parse, patched
from tests.models import EAGER_ONLY, FAMILIES, OTHER_FAMILIES, WITH_A_WINDOW, tiny_model
from tests.patches.model.test_other_families import NOT_TO_THE_BIT
from tests.patches.model.test_patched import UNSUPPORTED

FILE = Path(__file__).resolve().parent.parent / "docs" / "architectures.md"

HEAD = """# Architectures

Generated from the tests (`python -m tests.architectures`). Every row is a tiny random model, patched, measured and
compared with transformers. Ropeway measures the rotation on the running model, so models outside this table work too
if their attention dispatches by name. Any other model is refused at start-up with the reason.

| model | positions | where | table | default against transformers |
|---|---|---|---|---|
"""

NOTES = """
*Positions*: the meaning of `default` on a checkpoint of this kind. *Where*: the layers that follow the request's
encoding. Layers with another rotary type, or without rotation, keep it. *Table*: the pair layout of the rotation, and
the rotated dimensions of a head that rotates in part. *Default*: patched against unpatched logits in float32. "To the
bit" includes cached decoding, except in layers that slide or attend in chunks, which decode within 2e-5.

Rotary models are also tested with the native scalings `linear`, `dynamic`, `yarn`, `llama3` and `longrope`: as
`default` and as a request's encoding. All models run in mixed batches, in cached decoding and in the paged engine.

"""


def where(patch: Patched) -> str:
    roles = Counter(patch.roles.values())
    if not roles or set(roles) == {"slots"}:
        return "every layer"
    words = {"slots": "follow the request", "own": "keep another rotary type", "never": "rotate nothing"}
    return ", ".join(f"{count} of {sum(roles.values())} layers {words[role]}" for role, count in sorted(roles.items()))


def table(patch: Patched) -> str:
    geometry = patch.geometry
    if not geometry.rotates or not geometry.rotary_dim:
        return "none"
    layout = "interleaved" if geometry.interleaved else "half-split"
    if geometry.rotary_dim == geometry.head_dim:
        return layout
    first, last = geometry.rotary_offset, geometry.rotary_offset + geometry.rotary_dim - 1
    return f"{layout}, dimensions {first} to {last} of {geometry.head_dim}"


def line(family: str) -> str:
    attention = "eager" if family in EAGER_ONLY or family in NOT_TO_THE_BIT else "sdpa"
    _, model = tiny_model(family, attn_implementation=attention)
    with patched(model) as patch:
        native = patch.describe(parse({"method": "default"}), 32)["method"].replace("default", "plain RoPE")
        kept = "within 1e-6" if family in NOT_TO_THE_BIT else "to the bit"
        if family in WITH_A_WINDOW:
            kept += " (prefill)"
        return f"| {family} ({type(model).__name__}) | {native} | {where(patch)} | {table(patch)} | {kept} |"


def refusal(name: str) -> str:
    model = AutoModelForCausalLM.from_config(UNSUPPORTED[name][0](), dtype=torch.float32)
    try:
        with patched(model):
            raise AssertionError(f"{name} is carried")
    except UnsupportedModel as reason:
        return f"| {name} | {reason} |"


def document() -> str:
    lines = [line(family) for family in [*FAMILIES, *OTHER_FAMILIES]]
    return HEAD + "\n".join(lines) + "\n" + NOTES + "\n".join(refusal(name) for name in UNSUPPORTED) + "\n"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
