"""Measurement of one type: its plain forward, then the same under ``patched``, then the engine.

The oracle is the plain model, in float32, without a cache and without padding.
"""

from __future__ import annotations

import asyncio
import copy
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from patches import Patched, UnsupportedModel, parse, patched
from service.engine.request import SamplingParams
from service.evaluation.scoring.token_scores import TokenScores, prompt_scores
from service.models.checkpoint.loading import ModelLoadError, load
from service.models.checkpoint.text_model import class_for
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings
from tests.field.configurations import VARIANTS, CannotBeBuilt, tiny_config, tiny_model
from tests.field.passes import NEW, Logits, decoded, padded, passed
from tests.models import tiny_tokens
from tests.patches.forward import relative, slot_of
from tests.service.conftest import tiny_tokenizer

Result = Literal["carried", "carried without the engine", "refused", "wrong", "no decoder", "cannot be built"]
RESULTS: tuple[Result, ...] = get_args(Result)

LENGTHS = (50, 13, 33)
"""Tokens of the prompts, to which ``NEW`` are added: more than a window and less, within the trained length of 64."""

ROUNDING, DECODING = 5e-6, 3e-5
"""Largest differences, over the largest logit, of a plain pass and of everything else."""

DEFAULT: dict[str, Any] = {"method": "default"}
LINEAR: dict[str, Any] = {"method": "linear", "factor": 4.0}
IDENTITIES: list[dict[str, Any]] = [
    {"method": "self_extend", "group_size": 4, "neighbor_window": 64},
    {"method": "streaming", "sink_tokens": 2, "window": 64},
]
"""Encodings that rotate at read or cut by distance, and change nothing within so few tokens."""


@dataclass(frozen=True)
class Row:
    """Facts about one type or variant. ``reason`` says why it is not carried, or what differs."""

    name: str
    result: Result
    reason: str = ""
    positions: str = ""
    where: str = ""
    table: str = ""
    default: str = ""
    engine: str = ""


class Different(AssertionError):
    """The patched model, or the engine, does not compute what the plain model computes."""


def measure(name: str) -> Row:
    """Everything about one type or variant, from a checkpoint of random weights."""
    model_type, overrides = VARIANTS.get(name, (name, {}))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            config = tiny_config(model_type, **overrides)
            if config.is_encoder_decoder:
                return Row(name, "no decoder", "decoder of an encoder-decoder")
            tiny_model(model_type, **overrides).save_pretrained(folder)
            config.save_pretrained(folder)  # a multimodal checkpoint has all its parts
            tiny_tokenizer().save_pretrained(folder)
            expected = Expected(folder)
        except CannotBeBuilt as error:
            return Row(name, "cannot be built", str(error))
        except Exception as error:  # transformers fails in as many ways as it has models
            return Row(name, "cannot be built", f"transformers itself fails: {said(error)}")
        if not expected.is_causal:
            return Row(name, "no decoder", "its tokens see later ones")
        return _measured(name, folder, expected)


def _measured(name: str, folder: Path, expected: Expected) -> Row:
    settings = Settings(_env_file=None, model=str(folder), device="cpu", dtype="float32", cache_tokens=1024)
    try:
        model = load("tiny", folder, settings).model
        with patched(model) as patch:
            facts = _facts(patch) | {"default": _compared(patch, expected)}
        engine, reason = asyncio.run(_engine(settings, expected))
    except (UnsupportedModel, ModelLoadError) as error:
        return Row(name, "refused", said(error))
    except Exception as error:  # a server would not start, and would not say why
        return Row(
            name, "wrong", said(error) if isinstance(error, Different) else f"{type(error).__name__}: {said(error)}"
        )
    return Row(name, "carried" if engine else "carried without the engine", reason, **facts, engine=engine or "none")


class Expected:
    """Logits and greedy tokens of a checkpoint in transformers alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.model = folder, _plain(folder)
        self.rows = [tiny_tokens(1, length + NEW, seed=length)[0] for length in LENGTHS]
        self.prompts = [row[:length] for row, length in zip(self.rows, LENGTHS, strict=True)]
        self.logits = passed(self.model, self.rows)

    def scaled(self, fields: dict[str, Any], layer_type: str | None) -> Logits | None:
        """Logits when the checkpoint declares a scaling, of one layer type if its parameters are by type.

        None where it cannot, or where that has no effect.
        """
        config = copy.deepcopy(self.model.config)
        text = config.get_text_config()
        # Mistral 4 scales its scores by the ``mscale`` of YaRN, under any scaling that is declared.
        own = getattr(text, "rope_parameters", None) or {}
        parameters = {name: value for name, value in own.items() if "mscale" not in name}
        entries = {"rope_type": fields["method"], "factor": fields["factor"]}
        if "rope_theta" in parameters:
            text.rope_parameters = parameters | entries
        elif layer_type is not None and parameters.get(layer_type):
            text.rope_parameters = parameters | {layer_type: parameters[layer_type] | entries}
        else:
            return None
        try:
            logits = passed(_plain(self._folder, config), self.rows)
        except Exception:  # in as many ways: Phi-3 takes no scaling but its own
            return None
        return None if torch.equal(logits[0], self.logits[0]) else logits

    @property
    def is_causal(self) -> bool:
        """True if another last token changes nothing before it."""
        changed = self.rows[0].clone()
        changed[-1] = 3 + (changed[-1] - 2) % 100
        return relative(passed(self.model, [changed])[0][:-1], self.logits[0][:-1]) < DECODING

    def greedy(self) -> list[list[int]]:
        """``NEW`` tokens after each prompt, each from a whole pass."""
        found = []
        for prompt in self.prompts:
            row = prompt
            for _ in range(NEW):
                row = torch.cat([row, passed(self.model, [row])[0][-1:].argmax(-1)])
            found.append(row[len(prompt) :].tolist())
        return found


def _plain(folder: Path, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    kind = class_for(config or AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = kind.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval()


def _check(name: str, found: Logits, expected: Logits, tolerance: float) -> None:
    difference = largest(found, expected)
    if not difference <= tolerance:  # also NaN
        raise Different(f"{name} differs from the plain model's by {difference:.0e} of the largest logit")


def _compared(patch: Patched, expected: Expected) -> str:
    """The largest difference between a pass of the patched model and of the plain one, in words.

    Raises:
        Different: when a pass, a cache, a padded batch or an encoding on request gives other logits.
    """
    model, rows = patch.model, expected.rows
    alone = passed(model, rows)
    _check("a pass", alone, expected.logits, ROUNDING)
    notes = ["to the bit" if largest(alone, expected.logits) == 0 else "within 5e-6"]
    cached = decoded(expected.model, rows)
    for name, found, own in (
        ("cache", decoded(model, rows), cached),
        ("padded batch", padded(model, rows), padded(expected.model, rows)),
    ):
        if found is None or own is None:
            notes.append(f"it returns no {name}")
            continue
        differs = largest(own, expected.logits) > DECODING
        notes += [f"its own {name} differs from its pass"] if differs else []
        if differs and name == "padded batch":
            continue  # there is nothing to equal: beside padding, it attends to other keys
        _check(f"a {name}", found, own if largest(found, expected.logits) > DECODING else expected.logits, DECODING)
    for fields in filter(partial(_resolves, patch), IDENTITIES):
        slots, name = [slot_of(patch, fields, len(row)) for row in rows], fields["method"]
        _check(f"a pass under {name}", passed(model, rows, slots), expected.logits, DECODING)
        if cached is not None and largest(cached, expected.logits) <= DECODING:
            _check(f"a cache under {name}", decoded(model, rows, slots) or [], expected.logits, DECODING)
    scaled = expected.scaled(LINEAR, next((table.layer_type for table in patch.rotary_tables.chosen), None))
    if scaled is not None and _resolves(patch, LINEAR):
        slots = [slot_of(patch, LINEAR, len(row)) for row in rows]
        _check("a pass under linear", passed(model, rows, slots), scaled, DECODING)
    return "; ".join(notes)


def _resolves(patch: Patched, fields: dict[str, Any]) -> bool:
    try:
        patch.resolve(parse(fields), max(LENGTHS) + NEW)
    except ValueError:
        return False
    return True


async def _engine(settings: Settings, expected: Expected) -> tuple[str, str]:
    """Serve the checkpoint as a server does, and compare greedy tokens, or scores: (engine, why no engine serves it).

    Raises:
        Different: when a prompt among others gets other tokens, or other scores, than the plain model gives.
    """
    registry = ModelRegistry(settings)
    try:
        served = registry.default
        choice = served.engine.choice
        if not choice.generates:
            await _check_scores(served, expected)
            return "", choice.reason or ""
        tokens = await asyncio.gather(*[_generated(served, prompt.tolist()) for prompt in expected.prompts])
    finally:
        registry.close()
    if tokens != expected.greedy():
        raise Different(f"the {choice}'s greedy tokens are not those of the plain forward")
    return choice.kind + ("" if choice.together else ", one row at a time"), ""


async def _check_scores(served: ServedModel, expected: Expected) -> None:
    """Every row is scored in chunks of 16 tokens, beside the others.

    Raises:
        Different: when a token gets another log-probability than the plain model gives.
    """
    default = served.patch.resolve(parse(DEFAULT), max(LENGTHS) + NEW)
    scores: list[TokenScores] = await asyncio.gather(
        *(
            served.engine.score(
                prompt_scores(served.patch, default, row.tolist(), 16, top=0, with_next=False),
                len(row),
                lambda _: None,
                scored={},
            )
            for row in expected.rows
        )
    )
    for found, row, logits in zip(scores, expected.rows, expected.logits, strict=True):
        wanted = logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0].double()
        difference = float((torch.from_numpy(found.logprobs) - wanted).abs().max())
        if not difference <= DECODING * float(logits.abs().max()):  # also NaN
            raise Different(f"scores differ from the plain model's by {difference:.0e}")


async def _generated(served: ServedModel, prompt: list[int]) -> list[int]:
    resolved = served.patch.resolve(parse({"method": "default"}), len(prompt) + NEW)
    sampling = SamplingParams(ignore_eos=True)
    async for generation in served.engine.generate(prompt, resolved, sampling, NEW, pe_method="default"):
        last = generation
    return last.token_ids


def _facts(patch: Patched) -> dict[str, str]:
    native = patch.describe(parse({"method": "default"}), 32)["method"].replace("default", "plain RoPE")
    return {"positions": native, "where": where(patch), "table": table(patch)}


def where(patch: Patched) -> str:
    """The layers that attend, and those that follow a request's encoding."""
    layers, roles = int(patch.model.config.get_text_config().num_hidden_layers), Counter(patch.roles.values())
    attending = sum(roles.values()) or layers
    found = [] if attending == layers else [f"{attending} of {layers} layers attend"]
    if set(roles) - {"slots"}:
        words = {"slots": "follow the request", "own": "keep another rotary type", "never": "rotate nothing"}
        found += [f"{count} of {attending} layers {words[role]}" for role, count in sorted(roles.items())]
    return ", ".join(found) or "every layer"


def table(patch: Patched) -> str:
    """Pair layout of the rotation, and the rotated part of a head."""
    geometry = patch.geometry
    if not geometry.rotates or not geometry.rotary_dim:
        return "none"
    if geometry.keeps_positions is not None:
        return f"positions are kept: {geometry.keeps_positions}"
    layout = "interleaved" if geometry.interleaved else "half-split"
    layout += ", in the opposite sense" if geometry.reverses else ""
    if geometry.rotary_dim == geometry.head_dim:
        return layout
    first, last = geometry.rotary_offset, geometry.rotary_offset + geometry.rotary_dim - 1
    return f"{layout}, dimensions {first} to {last} of {geometry.head_dim}"


def said(error: BaseException) -> str:
    """The message of an error in one line, without the folder of the checkpoint and without measured numbers."""
    message = re.sub(r": at token [^;]*", "", " ".join(str(error).split())) or type(error).__name__
    for opening in ("cannot be served: ", "cannot be loaded: "):
        message = message.partition(opening)[2] or message
    return message


def largest(found: Logits, expected: Logits) -> float:
    """The largest difference, over the largest expected logit of its row."""
    return max(map(relative, found, expected))
