"""The training loop: AdamW (arXiv:1711.05101), cosine schedule with warmup, checkpoints that resume exactly.

A Llama trains inside ``patched``, so the seams that serve it are the seams that trained it. The demo model of other
families has its encoding inside and trains unpatched. The patch reads T5's table as numbers, without a gradient.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from patches import patched
from service.models.architecture import RopewayDemoForCausalLM
from service.models.training.corpus import PackedTokens
from service.models.training.curriculum import Curriculum
from service.models.training.recall import IGNORED
from service.models.training.shape import Preset

VALIDATION_ROWS = 64
FINAL_ROWS = 1024
EVALUATIONS = 20
"""Validation losses in the log, evenly spaced over the run."""
WARMUP = 0.03
FLOOR = 0.1
"""Share of the steps that warm up, and share of the peak rate that is left at the end."""
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Run:
    """One training run. ``folder`` holds its checkpoint and log; ``initial`` is the folder of the first weights.

    ``data`` is the fingerprint of its tokens.
    """

    preset: Preset
    steps: int
    seed: int
    precision: str
    folder: Path
    checkpoint_minutes: float = 5.0
    initial: str = ""
    data: str = ""


@dataclass(frozen=True)
class LogEntry:
    """Losses in nats per token; ``train_loss`` is the mean since the entry before."""

    step: int
    train_loss: float
    validation_loss: float
    seconds: float


@dataclass
class Progress:
    """The state of a checkpoint besides weights and optimizer."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)


OnStep = Callable[[int, float], None]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup, then a cosine down to a tenth of the peak."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def new_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms have one dimension."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def token_losses(model: Any, inputs: torch.Tensor, targets: torch.Tensor, precision: str) -> torch.Tensor:
    """Negative log-likelihood of every target, float32 [rows, tokens]; 0 where the target is ``IGNORED``."""
    device = model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(input_ids=inputs.to(device), use_cache=False).logits
    flat = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten(), reduction="none")
    return flat.view(targets.shape)


@torch.no_grad()
def position_losses(model: Any, data: PackedTokens, rows: int, precision: str) -> torch.Tensor:
    """Mean negative log-likelihood by position, float64 [context], over evenly spaced rows of ``data``."""
    index = np.linspace(0, len(data) - 1, min(rows, len(data))).astype(np.int64)
    parts = [token_losses(model, *data.rows(part), precision) for part in np.array_split(index, -(-len(index) // 16))]
    return torch.cat(parts).double().mean(0).cpu()


@contextmanager
def seams(model: Any) -> Iterator[None]:
    """The model as it trains; on a CPU attention runs as plain matrix products, 15 % faster than fused in bfloat16."""
    with ExitStack() as stack:
        if not isinstance(model, RopewayDemoForCausalLM):
            stack.enter_context(patched(model))
        if model.device.type == "cpu":
            before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
            stack.callback(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, before)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def train(model: Any, run: Run, data: Curriculum, heldout: PackedTokens, on_step: OnStep) -> Progress:
    """Train ``model`` in place, from the checkpoint in ``run.folder`` if there is one.

    Raises:
        CheckpointMismatch: when the checkpoint belongs to another run.
    """
    optimizer = new_optimizer(model, run.preset.learning_rate)
    progress = load_checkpoint(run, model, optimizer)
    started = time.monotonic() - progress.seconds
    saved_at = time.monotonic()
    with seams(model):
        while progress.step < run.steps:
            loss = _step(model, optimizer, run, data, progress.step)
            progress.step += 1
            progress.losses.append(loss)
            progress.seconds = time.monotonic() - started
            if _is_evaluation(progress.step, run.steps):
                _record(progress, float(position_losses(model, heldout, VALIDATION_ROWS, run.precision).mean()))
            if time.monotonic() - saved_at >= 60 * run.checkpoint_minutes or progress.step == run.steps:
                save_checkpoint(run, model, optimizer, progress)
                saved_at = time.monotonic()
            on_step(progress.step, loss)
    return progress


def _step(model: Any, optimizer: torch.optim.AdamW, run: Run, data: Curriculum, step: int) -> float:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, run.steps, run.preset.learning_rate)
    inputs, targets = data.batch(step)
    loss = token_losses(model, inputs, targets, run.precision).sum() / (targets != IGNORED).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _is_evaluation(step: int, steps: int) -> bool:
    return step == steps or step % max(1, steps // EVALUATIONS) == 0


def _record(progress: Progress, validation_loss: float) -> None:
    mean = sum(progress.losses) / len(progress.losses)
    progress.log.append(LogEntry(progress.step, mean, validation_loss, progress.seconds))
    progress.losses.clear()


class CheckpointMismatch(ValueError):
    """The checkpoint was written by another run; the message says in which way, and what to do."""


def save_checkpoint(run: Run, model: Any, optimizer: torch.optim.AdamW, progress: Progress) -> None:
    """Everything a bit-identical continuation needs; the data order follows from seed and step."""
    state = {
        "identity": _identity(run),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
        "rng": torch.get_rng_state(),
    }
    run.folder.mkdir(parents=True, exist_ok=True)
    partial = run.folder / "checkpoint.partial"
    torch.save(state, partial)
    partial.replace(run.folder / "checkpoint.pt")
    lines = [json.dumps(asdict(entry)) for entry in progress.log]
    (run.folder / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_checkpoint(run: Run, model: Any, optimizer: torch.optim.AdamW) -> Progress:
    """Restore the checkpoint in ``run.folder``, or start from zero."""
    path = run.folder / "checkpoint.pt"
    if not path.exists():
        return Progress()
    state = torch.load(path, map_location=model.device, weights_only=True)
    _refuse_another_run(path, state["identity"], _identity(run))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    entries = [LogEntry(**entry) for entry in state["progress"].pop("log")]
    return Progress(**state["progress"], log=entries)


def _identity(run: Run) -> dict[str, Any]:
    named = {"preset": asdict(run.preset), "steps": run.steps, "seed": run.seed, "precision": run.precision}
    return named | {"initial": run.initial, "data": run.data}


def _refuse_another_run(path: Path, written: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises:
    CheckpointMismatch: when the checkpoint in ``path`` is of a run with another identity.
    """
    differs = [name for name in asked if written.get(name) != asked[name]]
    if not differs:
        return
    texts = " on other texts" if "data" in differs else ""
    named = [name for name in differs if name != "data"]
    options = (
        f" with { ({name: written.get(name) for name in named}) }, not { ({name: asked[name] for name in named}) }"
    )
    raise CheckpointMismatch(
        f"{path} was written by a run{texts}{options if named else ''}: repeat that run, give another --run-dir, or "
        f"remove {path.parent} to train anew"
    )


def measure_steps(model: Any, run: Run, data: Curriculum, minutes: float, trial_seconds: float = 20.0) -> int:
    """Number of steps that fit into ``minutes`` here, from about ``trial_seconds`` of training; changes ``model``."""
    optimizer = new_optimizer(model, 0.0)
    with seams(model):
        _step(model, optimizer, run, data, 0)  # the first step also plans and allocates
        started, steps = time.monotonic(), 0
        while time.monotonic() - started < trial_seconds:
            steps += 1
            _step(model, optimizer, run, data, steps)
        seconds = (time.monotonic() - started) / steps
    return max(1, int(60 * minutes / seconds))
