"""A patched model in ordinary transformers code: ``generate`` with one encoding, or one for each row."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from patches import InvalidEncoding, Patched, SlotTable, parse, patched
from tests.models import OTHER_FAMILIES, TRAINED_LENGTH, by_tier, every_family, tiny_model, tiny_tokens
from tests.patches.forward import left_padded, logits_of, relative
from tests.patches.model.library.test_transformers_parity import SCALINGS, greedy, scalings_of, unpatched

TOLERANCE = 2e-5
END = 2
NEW = 6
LENGTHS = (70, 40, 9)
"""Prompts past the trained 64, short of it, and so short that most of the row is padding."""
ROTARY: list[str | dict[str, Any]] = ["default", "yarn:4", {"method": "self_extend", "neighbor_window": 16}]
OTHER: dict[str, list[str]] = {
    "gpt2": ["none", "learned_interpolation:factor=2", "alibi"],
    "gpt_neo": ["none", "learned_interpolation:factor=2", "alibi"],
    "biogpt": ["none", "learned_interpolation:factor=2", "alibi"],
    "opt": ["none", "learned_interpolation:factor=2", "alibi"],
    "xglm": ["default", "sinusoidal_interpolation:factor=4", "alibi"],
    "bloom": ["default", "none", "kerple_log"],
    "mpt": ["default", "none", "kerple_log"],
    "falcon_rw": ["default", "none", "kerple_log"],
}
"""Encodings of the families without rotation."""


def prompts(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    return [tiny_tokens(1, length, seed=length)[0] for length in lengths]


def one_pass_per_token(
    patch: Patched, row: torch.Tensor, encoding: Any, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy token ids and logits [steps, vocabulary] without a cache, through a slot in ``position_ids``."""
    slot = patch.slots.acquire(patch.resolve(encoding, length))
    steps = []
    for _ in range(NEW):
        steps.append(logits_of(patch.model, row[None], slot)[0, -1])
        allowed = steps[-1].clone()
        allowed[END] = -torch.inf
        row = torch.cat((row, allowed.argmax()[None]))
    patch.slots.release(slot)
    return row, torch.stack(steps)


def check_rows(patch: Patched, encodings: Sequence[Any], lengths: Sequence[int] = LENGTHS) -> None:
    """One batch, padded on the left, against each row alone."""
    rows = prompts(lengths)
    reserved = [len(row) + NEW for row in rows]
    ids, mask, _ = left_padded(rows)
    chosen = patch.encoding(encodings, length=reserved)
    tokens, steps = greedy(patch.model, ids, attention_mask=mask, **chosen)
    for number, row in enumerate(rows):
        expected, logits = one_pass_per_token(patch, row, encodings[number], reserved[number])
        assert torch.equal(tokens[number, -len(expected) :], expected), encodings[number]
        assert relative(steps[:, number], logits) < TOLERANCE, encodings[number]


# One encoding, and one for each row


@pytest.mark.parametrize("encoding", ["default", "yarn:4", "dynamic:2", "self_extend", "alibi", "streaming:window=24"])
def test_tokens_are_those_of_a_plain_loop(encoding: str, patch: Patched) -> None:
    row = prompts([70])[0]
    tokens, steps = greedy(patch.model, row[None], **patch.encoding(encoding, length=76))
    expected, logits = one_pass_per_token(patch, row, encoding, 76)
    assert torch.equal(tokens[0], expected)
    assert relative(steps[:, 0], logits) < TOLERANCE


def test_the_encodings_of_these_tests_differ(patch: Patched) -> None:
    row = prompts([70])[0]
    first, *others = [one_pass_per_token(patch, row, encoding, 76)[1] for encoding in [*ROTARY, "dynamic:2"]]
    assert all(relative(logits, first) > 0.01 for logits in others)


@every_family
def test_rows_of_a_padded_batch_have_their_own_encodings(family: str) -> None:
    with patched(unpatched(family)) as patch:
        check_rows(patch, ROTARY)
        check_rows(patch, ["dynamic:2", "dynamic:2", "default"])


@pytest.mark.parametrize("family", by_tier(OTHER_FAMILIES))
def test_rows_of_other_families(family: str) -> None:
    lengths = (50, 40, 9) if family in ("gpt2", "gpt_neo", "biogpt", "opt") else LENGTHS  # within the table
    with patched(tiny_model(family)[1]) as patch:
        check_rows(patch, OTHER.get(family, ROTARY), lengths)


def test_a_forward_takes_the_encoding_too(patch: Patched) -> None:
    tokens = tiny_tokens(2, 40)
    with torch.no_grad():
        both = patch.model(tokens, **patch.encoding(["yarn:4", "alibi"])).logits
        for row, encoding in enumerate(("yarn:4", "alibi")):
            alone = patch.model(tokens[row : row + 1], **patch.encoding(encoding)).logits
            assert relative(both[row : row + 1], alone) < TOLERANCE
            assert relative(alone, patch.model(tokens[row : row + 1]).logits) > 0.01


@every_family
def test_the_encoding_is_that_of_transformers(family: str) -> None:
    """``rope_parameters`` in a configuration, against the same object for a plain model."""
    plain, tokens = unpatched(family), tiny_tokens(2, 2 * TRAINED_LENGTH)
    unscaled = greedy(plain, tokens)[1]
    fixed = {
        name: fields
        for name, fields in scalings_of(family).items()
        if name in ("linear", "llama3", "yarn, mscale pair")
    }
    for rope_parameters in fixed.values():
        expected, logits = greedy(unpatched(family, rope_parameters), tokens)
        assert relative(unscaled, logits) > 0.01
        with patched(plain) as patch:
            result, steps = greedy(plain, tokens, **patch.encoding(rope_parameters))
        assert torch.equal(result, expected)
        assert relative(steps, logits) < TOLERANCE
    assert torch.equal(greedy(plain, tokens)[1], unscaled), "restored to the bit"


# Ways to generate


def test_beams_keep_the_encoding_of_their_row(patch: Patched) -> None:
    rows, options = prompts(), {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": NEW, "min_new_tokens": NEW}
    ids, mask, _ = left_padded(rows)
    together = patch.model.generate(ids, attention_mask=mask, **options, **patch.encoding(ROTARY))
    assert together.shape[0] == 2 * len(rows)
    for number, row in enumerate(rows):
        alone = patch.model.generate(row[None], **options, **patch.encoding(ROTARY[number]))
        assert torch.equal(together[2 * number : 2 * number + 2, -alone.shape[1] :], alone)
    plain = patch.model.generate(rows[0][None], **options)
    assert not torch.equal(plain, patch.model.generate(rows[0][None], **options, **patch.encoding("yarn:4")))


def test_several_samples_of_each_row(patch: Patched) -> None:
    ids, mask, _ = left_padded(prompts())
    options: dict[str, Any] = {"do_sample": True, "top_k": 1, "max_new_tokens": NEW, "min_new_tokens": NEW}
    once = patch.model.generate(ids, attention_mask=mask, **options, **patch.encoding(ROTARY))
    twice = patch.model.generate(ids, attention_mask=mask, num_return_sequences=2, **options, **patch.encoding(ROTARY))
    assert torch.equal(twice, once.repeat_interleave(2, dim=0))


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
@pytest.mark.parametrize("encoding", ["yarn:4", "self_extend"])
def test_other_ways_give_the_same_tokens(options: dict[str, Any], encoding: str, patch: Patched) -> None:
    tokens = tiny_tokens(1, 70)
    expected = patch.model.generate(tokens, max_new_tokens=NEW, do_sample=False, **patch.encoding(encoding))
    result = patch.model.generate(tokens, max_new_tokens=NEW, do_sample=False, **options, **patch.encoding(encoding))
    assert torch.equal(result, expected)


def test_a_conversation_continues_in_its_cache(patch: Patched) -> None:
    tokens, cache = tiny_tokens(1, 70), DynamicCache(config=patch.model.config)
    chosen = patch.encoding("self_extend")
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, **chosen}
    first = patch.model.generate(tokens, cache=cache, **options)
    longer = torch.cat((first, tiny_tokens(1, 8, seed=1)), dim=1)
    again = patch.model.generate(longer, cache=cache, **options)
    assert torch.equal(again, patch.model.generate(longer, **options))


@pytest.mark.parametrize("encoding", ["yarn:4", "self_extend"])
def test_a_draft_model_proposes_under_its_default(encoding: str, patch: Patched) -> None:
    tokens, options = tiny_tokens(1, 70), {"max_new_tokens": 3 * NEW, "do_sample": False}
    chosen, draft = patch.encoding(encoding), tiny_model("llama", seed=1)[1]
    expected = patch.model.generate(tokens, **options, **chosen)
    assert not torch.equal(patch.model.generate(tokens, **options), expected)
    for assistant in (draft, patch.model):
        assert torch.equal(patch.model.generate(tokens, assistant_model=assistant, **options, **chosen), expected)
    with ThreadPoolExecutor(4) as pool:
        options["assistant_model"] = draft
        for done in [pool.submit(patch.model.generate, tokens, **options, **chosen) for _ in range(8)]:
            assert torch.equal(done.result(), expected)
    assert "generate" not in vars(draft)
    del options["assistant_model"]
    with patched(draft) as other:
        own = vars(draft)["generate"]
        assert torch.equal(patch.model.generate(tokens, assistant_model=draft, **options, **chosen), expected)
        assert vars(draft)["generate"] is own
        assert other.slots.in_use() == 0


@pytest.mark.parametrize("given", ["argument", "configuration", "in its place", "replaced", "beneath", "processor"])
def test_guidance_is_refused_beside_an_encoding(given: str, patch: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unconditional forward would have the default encoding."""
    model, tokens = patch.model, tiny_tokens(1, 9)
    configuration = GenerationConfig(guidance_scale=3.0, max_new_tokens=2)
    if given in ("replaced", "beneath"):
        monkeypatch.setattr(model, "generation_config", configuration)
    places: list[Any] = [configuration] if given == "in its place" else []
    options: dict[str, Any] = {
        "argument": {"guidance_scale": 3.0},
        "configuration": {"generation_config": configuration},
        "beneath": {"generation_config": GenerationConfig(max_new_tokens=2)},
        "processor": {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(3.0, model)]},
    }.get(given, {})
    with pytest.raises(ValueError, match="guidance_scale: transformers runs"):
        model.generate(tokens, *places, max_new_tokens=2, **options, **patch.encoding("alibi"))
    assert model.generate(tokens, *places, max_new_tokens=2, **options).shape[1] > 9
    assert model.generate(tokens, max_new_tokens=2, guidance_scale=1.0, **patch.encoding("alibi")).shape[1] > 9


@pytest.mark.parametrize("given", ["argument", "configuration", "model"])
def test_token_healing_is_refused_beside_an_encoding(
    given: str, patch: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call inside that heals a prompt would have the default encoding."""
    options: dict[str, Any] = {"token_healing": True, "max_new_tokens": 2}
    if given == "model":
        monkeypatch.setattr(patch.model, "generation_config", GenerationConfig(**options))
    calls = {"argument": options, "configuration": {"generation_config": GenerationConfig(**options)}, "model": {}}
    with pytest.raises(ValueError, match="token_healing: transformers heals prompts under the default encoding"):
        patch.model.generate(tiny_tokens(1, 9), **calls[given], **patch.encoding("alibi"))
    with pytest.raises(ValueError, match="must pass the model's tokenizer"):
        patch.model.generate(tiny_tokens(1, 9), **calls[given])
    off = patch.model.generate(tiny_tokens(1, 9), token_healing=False, max_new_tokens=2, **patch.encoding("alibi"))
    assert off.shape[1] > 9


# Slots


def test_more_encodings_than_slots_one_after_another(patch: Patched) -> None:
    tokens, expected = tiny_tokens(1, 4), None
    for step in range(SlotTable.capacity + 10):
        with torch.no_grad():
            logits = patch.model(tokens, **patch.encoding(f"linear:{1 + step / 8}")).logits
        expected = logits if expected is None else expected
    assert patch.slots.in_use() == 0
    assert relative(logits, expected) > 0.01
    assert torch.equal(patch.model(tokens, **patch.encoding("linear:1")).logits, expected)


def test_more_encodings_than_slots_in_one_batch(patch: Patched) -> None:
    rows = SlotTable.capacity + 1
    chosen = patch.encoding([f"linear:{1 + step / 8}" for step in range(1, rows + 1)])
    with pytest.raises(ValueError, match="128 different encodings; a batch has 127 beside the default at most"):
        patch.model(tiny_tokens(rows, 4), **chosen)
    assert patch.slots.in_use() == 0


def test_equal_encodings_share_a_slot(patch: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    acquire = patch.slots.acquire
    monkeypatch.setattr(patch.slots, "acquire", lambda resolved: seen.append(acquire(resolved)) or seen[-1])
    patch.model(tiny_tokens(3, 4), **patch.encoding(["yarn:4", {"method": "yarn", "factor": 4.0}, "default"]))
    assert len(seen) == 2
    assert 0 in seen


# Refused


def test_a_length_is_required_where_it_matters(patch: Patched) -> None:
    for encoding in ("dynamic:2", "dynamic_yarn"):
        with pytest.raises(ValueError, match=f"length: {encoding.partition(':')[0]} depends on the reserved length"):
            patch.encoding(encoding)
    with pytest.raises(ValueError, match="length: dynamic depends"):
        patch.encoding(["default", "dynamic:2"])


@pytest.mark.parametrize("batch", [1, 2])
def test_no_row_goes_past_its_reserved_length(batch: int, patch: Patched) -> None:
    tokens = tiny_tokens(batch, 70)
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": NEW}
    patch.model.generate(tokens, max_new_tokens=NEW, **options, **patch.encoding("dynamic:2", length=76))
    with pytest.raises(ValueError, match="length: 75 tokens, but the encoding of row 0 reserved 74"):
        patch.model.generate(tokens, max_new_tokens=NEW, **options, **patch.encoding("dynamic:2", length=74))
    if batch == 2:
        with pytest.raises(ValueError, match="length: 75 tokens, but the encoding of row 1 reserved 74"):
            patch.model.generate(
                tokens, max_new_tokens=NEW, **options, **patch.encoding("dynamic:2", length=torch.tensor([80, 74]))
            )
    assert patch.slots.in_use() == 0


@pytest.mark.parametrize(
    ("encodings", "length", "message"),
    [
        ("yarn:4", 0, "length: 0 is not between 1 and 16777215"),
        ("yarn:4", 1 << 24, "length: 16777216 is not between"),
        ("yarn:4", "50", "length: '50' is no number of tokens"),
        ("yarn:4", 50.0, "length: 50.0 is no number of tokens"),
        ("yarn:4", [50, "60"], "is no number of tokens, nor one for each encoding"),
        (["yarn:4", "default"], [10, 20, 30], "length: 3 lengths for 2 encodings"),
        ([], None, "encodings: an empty list"),
        (None, None, "encodings: None is no encoding"),
        ("yarm:4", None, "yarm"),
        ("yarn:0.1", None, "factor"),
        ("learned", None, "method: learned is for models trained with learned positions"),
    ],
)
def test_bad_encodings_name_the_field(encodings: Any, length: Any, message: str, patch: Patched) -> None:
    with pytest.raises((ValueError, InvalidEncoding), match=message):
        patch.encoding(encodings, length=length)


def test_the_number_of_rows_is_checked(patch: Patched) -> None:
    with pytest.raises(ValueError, match="position_encoding: 2 encodings for 4 rows"):
        patch.model.generate(tiny_tokens(4, 9), max_new_tokens=1, **patch.encoding(["yarn:4", "default"]))


@pytest.mark.parametrize("value", ["yarn:4", 0, ["yarn:4"]])
def test_the_argument_comes_from_encoding(value: Any, patch: Patched) -> None:
    with pytest.raises(ValueError, match="no encoding of this patched model"):
        patch.model(tiny_tokens(1, 4), position_encoding=value)


def test_encodings_of_another_model_or_of_an_earlier_patch_are_refused(llama: PreTrainedModel) -> None:
    tokens, other = tiny_tokens(1, 9), tiny_model("llama", seed=1)[1]
    with patched(llama) as one, patched(other) as two:
        chosen = one.encoding("yarn:4")
        two.encoding("linear:4")
        with pytest.raises(ValueError, match="no encoding of this patched model"):
            other(tokens, **chosen)
    with pytest.raises(ValueError, match="position_encoding"):
        llama.generate(tokens, max_new_tokens=1, **chosen)
    with patched(llama), pytest.raises(ValueError, match="no encoding of this patched model"):
        llama.generate(tokens, max_new_tokens=1, **chosen)


# Reading an encoding


def test_the_numbers_of_an_encoding_can_be_read(patch: Patched) -> None:
    assert patch.resolve("dynamic:2", 128) == patch.resolve(parse("dynamic:2"), 128)
    assert patch.resolve("dynamic:2", 128) != patch.resolve("dynamic:2", 256)
    shown = patch.describe(SCALINGS["yarn"](8), 256)
    assert (shown["method"], shown["factor"], shown["reserved_length"]) == ("yarn", 4.0, None)
