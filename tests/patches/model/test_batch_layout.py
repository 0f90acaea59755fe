"""Layouts of a batch: equal rows, padding on either side, packed rows, generation, and batches that are refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from patches import encode, patched
from patches.model import seams
from tests.field.configurations import tiny_model as field_model
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import left_padded, logits_of, relative, slot_of
from tests.patches.model.test_mixed_batch import LENGTHS, TOLERANCE, batched, eight, model_of, packed_logits, prompts


def test_equal_rows_of_one_encoding_share_a_segment_and_stay_apart() -> None:
    """Neighbours with the same encoding and length run as one block of rows, despite rows between blocks."""
    model = model_of("llama")
    tokens = list(tiny_tokens(6, 40))
    with patched(model) as patch:
        a, b = (slot_of(patch, fields, 40) for fields in ({"method": "yarn", "factor": 4.0}, {"method": "self_extend"}))
        slots = [a, a, b, b, b, a]
        mixed = batched(model, tokens, slots)
        for row, slot, result in zip(tokens, slots, mixed, strict=True):
            assert relative(result, logits_of(model, row[None], slot)[0]) < TOLERANCE


@torch.no_grad()
def test_position_ids_are_read_anew_in_every_forward() -> None:
    """A caller may keep one tensor: for other rows, for another mask, or rewritten in place."""
    model, tokens = model_of("llama"), tiny_tokens(3, 30)
    position_ids = torch.arange(30)[None].repeat(3, 1)
    with patched(model) as patch:
        slot = slot_of(patch, {"method": "self_extend"}, 30)
        plain = logits_of(model, tokens)
        assert torch.equal(model(tokens, position_ids=position_ids).logits, plain)
        position_ids[1] = encode(position_ids[1], slot)
        assert (
            relative(model(tokens, position_ids=position_ids).logits[1], logits_of(model, tokens, slot)[1]) < TOLERANCE
        )
        position_ids[1], mask = (torch.arange(30) - 9).clamp_min(0), torch.ones_like(tokens)
        mask[1, :9] = 0
        padded = model(tokens, position_ids=position_ids, attention_mask=mask).logits
        assert relative(padded[1, 9:], logits_of(model, tokens[1:2, 9:])[0]) < TOLERANCE
        shared = position_ids[:1]
        assert torch.equal(model(tokens[:2], position_ids=shared).logits, logits_of(model, tokens[:2]))
        assert torch.equal(model(tokens, position_ids=shared).logits, plain)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_right_padding_is_harmless_for_real_tokens(family: str) -> None:
    model = model_of(family)
    tokens = prompts()
    longest = max(LENGTHS)
    ids = torch.stack([pad(row, (0, longest - len(row))) for row in tokens])
    mask = torch.stack([pad(torch.ones(len(row)), (0, longest - len(row))) for row in tokens]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(eight(8, 3), tokens, strict=True)]
        output = model(ids, attention_mask=mask, position_ids=encode(positions, torch.tensor(slots)[:, None])).logits
        for row, slot, logits in zip(tokens, slots, output, strict=True):
            assert relative(logits[: len(row)], logits_of(model, row[None], slot)[0]) < TOLERANCE


def test_generate_carries_the_slots_of_a_batch() -> None:
    """transformers' own loop counts the encoded positions up, and never knows what they carry."""
    model = model_of("llama")
    tokens = prompts()
    ids, mask, positions = left_padded(tokens)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    generate: Any = model.generate
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row) + 8) for fields, row in zip(eight(8, 4), tokens, strict=True)]
        encoded = encode(positions, torch.tensor(slots)[:, None])
        mixed = generate(ids, attention_mask=mask, position_ids=encoded, **options)[:, -8:]
        for row, slot, result in zip(tokens, slots, mixed, strict=True):
            position_ids = encode(torch.arange(len(row)), slot)[None]
            alone = generate(row[None], position_ids=position_ids, **options)[0, -8:]
            assert torch.equal(result, alone)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_sequences_packed_into_one_row(family: str) -> None:
    """As a paged engine feeds them: end to end, each from its own position 0 and with its own encoding."""
    model, tokens = model_of(family), prompts()
    with patched(model) as patch:
        slots = [slot_of(patch, fields, len(row)) for fields, row in zip(eight(8, 2), tokens, strict=True)]
        packed = packed_logits(model, patch, tokens, slots)
        for row, slot, logits in zip(tokens, slots, packed, strict=True):
            assert relative(logits, logits_of(model, row[None], slot)[0]) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
@torch.no_grad()
def test_several_texts_in_a_row(family: str, rows: int) -> None:
    """As collators without padding send them: ``position_ids`` begin anew, and there is no mask.

    transformers masks them so without a cache, or in flash attention.
    """
    model, tokens = tiny_model(family)[1], [row[:60] for row in prompts()]
    lengths = [len(row) for row in tokens]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.cat(tokens)[None]
    plain = model(ids, position_ids=positions, use_cache=False).logits
    with patched(model) as patch:
        assert relative(model(ids, position_ids=positions).logits, plain) < TOLERANCE
        encodings = ["alibi", "none"] if family == "gpt2" else ["self_extend:neighbor_window=16", "yarn:4"]
        chosen, other = patch.encoding(encodings[:rows]), torch.arange(positions.shape[1])[None]
        packed = model(ids.expand(rows, -1), position_ids=torch.cat([positions, other])[:rows], **chosen).logits
        for row, logits in zip(tokens, packed[0].split(lengths), strict=True):
            assert relative(logits, model(row[None], **patch.encoding(encodings[0])).logits[0]) < TOLERANCE
        if rows == 2:
            assert relative(packed[1], model(ids, **patch.encoding(encodings[1])).logits[0]) < TOLERANCE
        if family != "gpt2":
            with pytest.raises(ValueError, match="60 tokens, but the encoding of row 0 reserved 59"):
                model(ids, position_ids=positions, **patch.encoding("dynamic:2", length=59))
        cache = model(ids[:, :2], use_cache=True).cache
        with pytest.raises(ValueError, match="count up by one behind cached tokens"):
            model(ids, position_ids=positions, cache=cache)
        with pytest.raises(ValueError, match="rows of several texts take no more tokens"):
            model.generate(ids, position_ids=positions, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("family", ["jamba", "lfm2", "qwen3_next", "deepseek_v32", "deepseek_v4", "doge"])
@torch.no_grad()
def test_texts_that_a_model_mixes_are_refused(family: str) -> None:
    """Recurrent layers go on from one text into the next; layers that choose keys choose those of other texts."""
    model = field_model(family)
    tokens = torch.arange(1, 13)[None]
    with patched(model):
        model(tokens, position_ids=torch.arange(12)[None])
        for _ in range(2):
            with pytest.raises(ValueError, match="layers of this model mix the texts of a row; give each text a row"):
                model(tokens, position_ids=torch.arange(12)[None] % 6)


@torch.no_grad()
def test_a_measurement_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = field_model("lfm2")
    tokens, positions = torch.arange(1, 13)[None], torch.arange(12)[None] % 6
    measure, failures = seams.keeps_texts_apart, [torch.OutOfMemoryError("none left")]

    def failing(*args: Any) -> bool:
        if failures:
            raise failures.pop()
        return measure(*args)

    monkeypatch.setattr(seams, "keeps_texts_apart", failing)
    with patched(model):
        with pytest.raises(torch.OutOfMemoryError):
            model(tokens, position_ids=positions)
        with pytest.raises(ValueError, match="layers of this model mix the texts of a row"):
            model(tokens, position_ids=positions)


@torch.no_grad()
def test_no_forward_of_another_thread_passes_during_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    model = field_model("lfm2")
    tokens, positions = torch.arange(1, 13)[None], torch.arange(12)[None] % 6
    measure = seams.keeps_texts_apart

    def slow(*args: Any) -> bool:
        time.sleep(0.05)
        return measure(*args)

    def asked(_: int) -> str:
        with torch.no_grad():
            try:
                model(tokens, position_ids=positions)
            except ValueError as error:
                return str(error)
        return "answered"

    monkeypatch.setattr(seams, "keeps_texts_apart", slow)
    with patched(model), ThreadPoolExecutor(4) as threads:
        answers = set(threads.map(asked, range(4)))
    assert answers == {"position_ids: layers of this model mix the texts of a row; give each text a row"}


# Batches that are refused

MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
COUNTED = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("position_ids", "mask", "message"),
    [
        (torch.tensor([[0, 1, 2, 1, 2, 3]]), None, "another text in a row begins at 0"),
        (encode(torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 0]])), None, "same slot"),
        (torch.tensor([[0, 2, 4, 6, 8, 10]]), None, "count up by one"),
        (torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]), None, "start alike"),
        (torch.arange(6).expand(2, -1), MASK, "first unpadded token"),
        (COUNTED + 1, MASK, "first unpadded token"),
        (encode(torch.arange(6), torch.tensor([[0, 0, 0, 1, 1, 1]])), None, "same slot"),
        (encode(COUNTED, torch.tensor([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 2]])), MASK, "same slot"),
    ],
    ids=[
        "text_begins_at_1",
        "texts_of_two_slots",
        "strided",
        "shifted_row",
        "padding_counted",
        "shifted",
        "two_slots",
        "two_slots_padded",
    ],
)
@torch.no_grad()
def test_wrong_position_ids_are_refused(position_ids: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    model = model_of("llama")
    with patched(model), pytest.raises(ValueError, match=message):
        model(tiny_tokens(len(position_ids), 6), attention_mask=mask, position_ids=position_ids)


@torch.no_grad()
def test_a_slot_without_an_encoding_is_refused() -> None:
    model = model_of("llama")
    with patched(model), pytest.raises(IndexError, match="slot 9"):
        model(tiny_tokens(1, 6), position_ids=encode(torch.arange(6)[None], 9))


@torch.no_grad()
def test_a_ready_made_mask_is_refused() -> None:
    model = model_of("llama")
    dense = torch.ones(1, 1, 6, 6).tril().bool()
    with patched(model), pytest.raises(ValueError, match="padding mask"):
        model(tiny_tokens(1, 6), attention_mask=dense)
