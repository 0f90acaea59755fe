"""Checkpoints that ship a context extension, with their published parameters, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from patches import InvalidEncoding, encode, parse, patched, resolve
from tests import scalings
from tests.field import configurations
from tests.field.configurations import HEAD_DIM
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of
from tests.scalings import CASES, Case, Fields, carried, model_of, unscaled

TOLERANCE = 2e-5
LAST, CHUNK, REPEATED = 8, 128, 64
"""Tokens compared, tokens whose keys are computed at once, and columns of the cache that each such chunk fills."""

QUICK = {("DeepSeek-V3", 1)}
every_case_and_length = pytest.mark.parametrize(
    ("name", "times"),
    [
        pytest.param(name, times, marks=() if (name, times) in QUICK else pytest.mark.slow)
        for name in CASES
        for times in (1, 2 if CASES[name].whole else 4)  # a whole pass takes the square of its length
    ],
)
REQUESTS: list[Fields] = [
    {"method": "linear", "factor": 4.0},
    {"method": "ntk", "factor": 8.0},
    {"method": "yarn", "factor": 2.0},
    {"method": "llama3", "factor": 4.0},
    {"method": "dynamic_yarn"},
    {"method": "default", "rope_theta": 3e6},
]


@torch.no_grad()
def last_logits(model: PreTrainedModel, length: int, slot: int, *, whole: bool) -> torch.Tensor:
    """Logits [1, LAST, vocabulary] behind ``length`` - LAST keys.

    The keys are those of chunks without a past, one chunk in ``REPEATED``, and a cache has it as often. Repeated keys
    weigh as much as single ones, and both sides compute the same ones.
    """
    tokens, positions = tiny_tokens(1, length), encode(torch.arange(length)[None], slot)
    if whole:
        result: torch.Tensor = model(tokens, position_ids=positions, use_cache=False, logits_to_keep=LAST).logits
        return result
    parts: list[DynamicCache] = []
    for start in range(0, length - LAST, CHUNK * REPEATED):
        chunk = slice(start, min(start + CHUNK, length - LAST))
        parts.append(DynamicCache())
        model(
            tokens[:, chunk],
            position_ids=positions[:, chunk],
            cache=parts[-1],
            use_cache=True,
            logits_to_keep=1,
        )
    cache = DynamicCache()
    for index in range(len(parts[0].layers)):
        layers = [part.layers[index] for part in parts]
        columns = [layer for layer in layers for _ in range(REPEATED)]
        keys, values = (torch.cat([getattr(layer, kind) for layer in columns], 2) for kind in ("keys", "values"))
        cache.update(keys[:, :, : length - LAST], values[:, :, : length - LAST], index)
    output = model(tokens[:, -LAST:], position_ids=positions[:, -LAST:], cache=cache, use_cache=True)
    assert cache.get_seq_length() == length
    logits: torch.Tensor = output.logits
    return logits


@every_case_and_length
def test_default_is_transformers_own_at_multiples_of_the_trained_length(name: str, times: int) -> None:
    case = CASES[name]
    model = model_of(case)
    with carried(case) as patch:
        trained = patch.geometry.original_max_position_embeddings
    length = times * trained
    expected = last_logits(model, length, 0, whole=case.whole)
    with patched(model) as patch:
        slot = slot_of(patch, {"method": "default"}, length)
        found = last_logits(model, length, slot, whole=case.whole)
    assert relative(found, expected) < TOLERANCE
    if times == 1:
        plain = last_logits(unscaled(case, trained), length, 0, whole=case.whole)
        assert relative(plain, expected) > 0.01, "the extension must matter"


@pytest.mark.parametrize("name", CASES)
def test_no_extension_applies_twice(name: str) -> None:
    case = CASES[name]
    with carried(case) as patch:
        scaled = patch.geometry
    trained = scaled.original_max_position_embeddings
    with patched(unscaled(case, trained)) as patch:
        plain = patch.geometry
    assert (plain.original_max_position_embeddings, plain.rope_theta) == (trained, scaled.rope_theta)
    assert plain.native is None
    for fields in REQUESTS:
        for length in (trained, 4 * trained):
            of_scaled, of_plain = (resolve(parse(fields), geometry, length) for geometry in (scaled, plain))
            assert of_scaled.inv_freq == of_plain.inv_freq, fields
            assert of_scaled.attention_factor == of_plain.attention_factor, fields
    divided = resolve(parse({"method": "linear", "factor": 4.0}), scaled, trained)
    base = [scaled.rope_theta ** (-2 * pair / scaled.rotary_dim) for pair in range(scaled.rotary_dim // 2)]
    assert divided.inv_freq == pytest.approx([frequency / 4 for frequency in base], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_declared_parameters_as_a_request_are_the_default(name: str) -> None:
    case = CASES[name]
    declared = declared_by(case)
    with carried(case) as patch:
        trained = patch.geometry.original_max_position_embeddings
        for length in (trained, 4 * trained):
            default, sent = (patch.resolve(fields, length) for fields in ({"method": "default"}, declared))
            assert (sent.inv_freq, sent.attention_factor) == (default.inv_freq, default.attention_factor)
            mapped = patch.resolve({"method": "self_extend", "group_size": 4, "neighbor_window": 64}, length)
            assert mapped.inv_freq == default.inv_freq, "a position map uses it once"


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_parameters_by_type_of_layer_are_the_default_where_they_are_the_checkpoints_own(family: str) -> None:
    model = tiny_model(family)[1]
    own = model.config.rope_parameters
    other = {**own, "full_attention": {**own["full_attention"], "rope_theta": 1234.0}}
    with patched(model) as patch:
        assert patch.encoding(own) == patch.encoding(dict(own)) == patch.encoding("default")
        assert patch.describe(own, 64) == patch.describe("default", 64)
        assert patch.resolve(own["full_attention"], 64) == patch.resolve("default", 64)
        for encoding in (other, {**own, "rope_type": None}):
            with pytest.raises(InvalidEncoding, match="an object per type of layer is no encoding: ask for default"):
                patch.encoding(encoding)


PAIRS = range(HEAD_DIM // 2)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
LISTS = {"short_factor": [1.0 + 0.1 * pair for pair in PAIRS], "long_factor": [1.0 + 0.7 * pair for pair in PAIRS]}
MSCALES = {"short_mscale": 1.24, "long_mscale": 1.37, "original_max_position_embeddings": 32}
DECLARED: list[tuple[str, Fields, Fields]] = [
    ("llama", DYNAMIC, DYNAMIC),
    ("llama", DYNAMIC, {name: value for name, value in DYNAMIC.items() if name != "rope_theta"}),
    ("phimoe", *[{"rope_type": "longrope", "rope_theta": 1e4, **LISTS, **MSCALES}] * 2),
    *[
        ("dots3_note_text", {**fields, "partial_rotary_factor": 0.4}, {"method": "default"})
        for fields in (DYNAMIC, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    ],
]


@pytest.mark.parametrize(("kind", "own", "sent"), DECLARED)
def test_entries_that_transformers_reads_otherwise_are_the_default(kind: str, own: Fields, sent: Fields) -> None:
    """No original length counts for ``dynamic``. Phi-MoE applies factors by length and its short list at any."""
    model = configurations.tiny_model(kind, rope_parameters=own)
    texts = [tiny_tokens(1, length) for length in (20, 32, 33, 64, 100)]
    with torch.no_grad():
        expected = [model(tokens, use_cache=False).logits for tokens in texts]
    with patched(model) as patch:
        for tokens, plain in zip(texts, expected, strict=True):
            length = tokens.shape[1]
            echo = patch.describe(sent, length)
            for fields in (sent, {"method": "default"}, echo):
                found = logits_of(model, tokens, slot_of(patch, fields, length))
                assert relative(found, plain) < TOLERANCE, (length, fields)


def declared_by(case: Case) -> Fields:
    """The ``rope_parameters`` that transformers makes of the published entries, for the layers that requests choose."""
    parameters: Fields = model_of(case).config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    return {name: value for name, value in parameters.items() if name != "type"}


@pytest.mark.slow
def test_the_page_is_what_was_measured() -> None:
    assert scalings.FILE.read_text(encoding="utf-8") == scalings.document(), "python -m tests.scalings"
