"""Every rotary architecture: encodings mixed in one padded batch, decoded from a cache, equal each alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from patches import encode, parse, patched
from tests.field import configurations
from tests.methods import Fields
from tests.models import EAGER_ONLY, every_family, tiny_model, tiny_tokens
from tests.patches.forward import chunked_logits, left_padded, logits_of, relative, slot_of

TOLERANCE = 3e-5
LENGTHS = [70, 33, 51, 64, 12]
REQUESTS: list[Fields] = [
    {"method": "default"},
    {"method": "yarn", "factor": 4.0, "attention_temperature": "log_n"},
    {"method": "alibi"},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 8},
    {"method": "streaming", "sink_tokens": 2, "window": 9},
]


@every_family
def test_mixed_rows_from_a_cache(family: str) -> None:
    model = tiny_model(family, attn_implementation="eager" if family in EAGER_ONLY else "sdpa")[1]
    tokens = [tiny_tokens(1, length, seed=length)[0] for length in LENGTHS]
    ids, mask, positions = left_padded(tokens)
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(REQUESTS, tokens, strict=True)]
        alone = [logits_of(model, row[None], slot)[0] for row, slot in zip(tokens, slots, strict=True)]
        encoded = encode(positions, torch.tensor(slots)[:, None])
        cache = DynamicCache(config=model.config)
        mixed = chunked_logits(model, ids, mask, encoded, cache=cache, chunks=[40, 17, 11, 1, 1])
        swapped = logits_of(model, tokens[1][None], slots[3])[0]
    for row, expected in enumerate(alone):
        assert relative(mixed[row, mask[row].bool()], expected) < TOLERANCE, REQUESTS[row]
    assert relative(swapped, alone[1]) > 0.01, "a row with another row's encoding must show"


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", {"slots": 2}),
        ("gemma3", {"own": 2, "slots": 2}),
        ("llama4", {"slots": 3, "never": 1, "tempered": 1}),
        ("ministral3", {"slots": 2, "tempered": 2}),
        ("gpt2", {"slots": 2}),
    ],
)
def test_the_echo_says_which_layers_an_encoding_reaches(family: str, layers: dict[str, int]) -> None:
    with patched(tiny_model(family)[1]) as patch:
        assert patch.describe(parse({"method": "default"}), 32)["layers"] == layers


def test_layers_with_a_window_keep_their_table_even_where_its_numbers_are_equal() -> None:
    """Olmo 3 declares a scaling for the other layers only; before that, both kinds rotate alike."""
    with patched(configurations.tiny_model("olmo3")) as patch:
        assert dict(patch.roles) == {0: "own", 1: "slots"}
        assert patch.windowed == {0: 24}
