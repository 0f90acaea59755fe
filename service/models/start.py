"""Models as every rank starts them: loaded, patched, and with an engine that was compared with their own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog
from torch import nn

from patches import Patched, UnsupportedModel, ignored_entries, patched, runs_triton
from service.engine.choice import Attention, AttentionUnavailable, EngineChoice, GraphsUnavailable
from service.engine.verification import verify
from service.models.checkpoint.adapters import adapted, by_base
from service.models.checkpoint.fingerprint import contents, fingerprint
from service.models.checkpoint.loading import Checkpoint, ModelLoadError, load, quantized, sources
from service.models.checkpoint.reasons import reason_of
from service.models.checkpoint.text_model import forward
from service.models.linear.layers import use_fastest
from service.settings import Settings

log = structlog.get_logger()


@dataclass(frozen=True)
class Started:
    """A checkpoint ready to serve. ``contents`` and ``fingerprint`` are hashes, as in ``ServedModel``."""

    checkpoint: Checkpoint
    contents: str
    fingerprint: str
    patch: Patched
    choice: EngineChoice


def started(settings: Settings) -> Iterator[list[AbstractContextManager[Started]]]:
    """Every model of the settings with its adapters; each is patched within its context.

    Raises:
        ModelLoadError: for a model that cannot be loaded or served.
    """
    served = sources(settings)
    adapters = by_base(settings.adapters, served)
    for name, source in served.items():
        log.info("loading", model=name)
        base = load(name, source, settings)
        related = [base, *(adapted(base, adapter) for adapter in adapters.get(name, ()))]
        checkpoints = [quantized(checkpoint, settings) for checkpoint in related]
        # Layers that adapters changed or that quantization left. Those of several models share plain weights.
        use_fastest(nn.ModuleList([checkpoint.model for checkpoint in checkpoints]))
        yield [_started(checkpoint, settings) for checkpoint in checkpoints]


@contextmanager
def _started(checkpoint: Checkpoint, settings: Settings) -> Iterator[Started]:
    model = checkpoint.model
    weights = contents(model)  # before anything runs
    identity = fingerprint(model, weights)
    try:
        patching = patched(model)
        patch = patching.__enter__()
    except Exception as error:  # another version of a model's code fails in its own way
        raise _refusal(checkpoint, _explained(error, model, settings)) from error
    try:
        if ignored := ignored_entries(model):
            log.warning("rope_parameters_ignored", model=checkpoint.name, entries=ignored)
        yield Started(checkpoint, weights, identity, patch, _choice(checkpoint, patch, settings))
    finally:
        patching.__exit__(None, None, None)


def _choice(checkpoint: Checkpoint, patch: Patched, settings: Settings) -> EngineChoice:
    try:
        choice = verify(patch, _attention(patch, settings), settings.page_size, settings.cuda_graphs)
    except AttentionUnavailable as error:
        raise ModelLoadError(f"ROPEWAY_ATTENTION: {error}") from error
    except GraphsUnavailable as error:
        raise ModelLoadError(f"ROPEWAY_CUDA_GRAPHS: {error}") from error
    except Exception as error:
        raise _refusal(checkpoint, error) from error
    if choice.attention == "triton":
        patch.read_in_place()
    if settings.tensor_parallel > 1:
        if choice.kind != "paged":
            reason = f"ranks share the paged engine only, and it has the {choice}: {choice.reason}"
            raise _refusal(checkpoint, UnsupportedModel(reason))
        assert patch.continues is not None  # measured by a forward, which has to run on every rank
        assert patch.returns_cache
    return choice


def _attention(patch: Patched, settings: Settings) -> Attention:
    """The setting, or the fastest of the machine; ranks that share a model have no kernel."""
    device = patch.model.device
    has_kernel = device.type == "cuda" and settings.tensor_parallel == 1 and runs_triton(device)
    return settings.attention or ("triton" if has_kernel else "segments")


def _explained(error: Exception, model: Any, settings: Settings) -> Exception:
    """The error, or logits that are not finite as its cause. Ranks that share a model are not asked."""
    if settings.tensor_parallel == 1:
        with suppress(Exception):  # a model whose forward fails keeps its own error
            if not forward(model).isfinite().all():
                kind = str(model.dtype).removeprefix("torch.")
                return UnsupportedModel(f"its logits are not finite numbers (its weights are read as {kind})")
    return error


def _refusal(checkpoint: Checkpoint, error: Exception) -> ModelLoadError:
    why = error if isinstance(error, UnsupportedModel) else reason_of(error)
    how = f" (its weights are quantized by {checkpoint.quantization.scheme})" if checkpoint.quantization else ""
    return ModelLoadError(f"ROPEWAY_MODEL: model {checkpoint.name!r}{how} cannot be served: {why}")
