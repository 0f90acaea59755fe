"""The served models: which there are, what each can take, and which one answers a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import structlog
import torch

from patches import MAX_POSITION, Method, Patched
from service.engine.choice import CannotGenerate
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.metrics import EngineMetrics
from service.engine.verification import checked_length
from service.machine.memory import free_bytes
from service.metrics import Metrics
from service.models.checkpoint.fingerprint import numerics, of_tokenizer
from service.models.checkpoint.loading import Checkpoint, ModelLoadError, refuse_undivided
from service.models.checkpoint.numerics import Numerics
from service.models.checkpoint.quantization import Quantization
from service.models.memory.cache_size import CPU_REACH, cache_bytes, cache_tokens, reserved_bytes
from service.models.memory.score_size import MOST_TOKENS, score_bytes, score_bytes_per_token, score_tokens
from service.models.memory.weights import places
from service.models.parallel.group import check
from service.models.parallel.leader import leading
from service.models.start import Started, started
from service.models.text.grammars import Grammars
from service.policy.policy import Policy
from service.settings import Settings
from service.sharing.pool import Pool

log = structlog.get_logger()


class UnknownModel(LookupError):
    """No served model has this name; ``known`` lists those that are. It came in the field ``param``."""

    def __init__(self, name: str, known: list[str], param: str = "model") -> None:
        super().__init__(f"unknown model {name!r}")
        self.name, self.known, self.param = name, known, param


@dataclass(frozen=True)
class Memory:
    """Bytes of a served model: its weights, those of them that it shares with its base, and its cache."""

    weights: int
    shared: int
    cache: int


@dataclass
class ServedModel:
    """One model in memory with its engine, tokenizer and limits.

    ``contents`` identifies its configuration and weights, ``fingerprint`` the numerics too. ``bound`` is the setting
    that gives ``max_length``. ``base`` is the model of an adapter. ``memory`` is in bytes, ``policy`` the operator's.
    ``score_chunk`` bounds the chunks of its passes, ``score_room`` is the memory of its device that weights and caches
    leave to them.
    """

    name: str
    contents: str
    fingerprint: str
    patch: Patched
    engine: Engine
    tokenizer: Any
    max_length: int
    bound: str
    memory: Memory
    base: str | None = None
    quantization: Quantization | None = None
    policy: Policy | None = None
    score_chunk: int | None = None
    score_room: int | None = None

    @property
    def numerics(self) -> Numerics:
        return numerics(self.patch.model)

    @cached_property
    def tokenizer_hash(self) -> str:
        return of_tokenizer(self.tokenizer)

    def check_generates(self) -> None:
        """Raises:
        CannotGenerate: when no engine serves this model; it is scored only.
        """
        if not self.engine.choice.generates:
            raise CannotGenerate(f"model {self.name!r} is scored only, it has no engine: {self.engine.choice.reason}")

    @cached_property
    def vocab_size(self) -> int:
        embeddings: Any = self.patch.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for this model's tokens."""
        return Grammars(self.tokenizer, self.vocab_size, self.engine.eos_token_ids)

    @cached_property
    def trained_length(self) -> int:
        return self.patch.geometry.original_max_position_embeddings

    @cached_property
    def bos_token_id(self) -> int | None:
        bos: int | None = self.tokenizer.bos_token_id
        return bos

    @cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer starts a text with BOS by itself."""
        ids = self.tokenizer("a")["input_ids"]
        return self.bos_token_id is not None and bool(ids) and ids[0] == self.bos_token_id

    @cached_property
    def variants(self) -> dict[str, str]:
        """Kind of training -> served name, as the checkpoint's configuration declares it."""
        return dict(getattr(self.patch.model.config, "position_encoding_variants", None) or {})


class ModelRegistry:
    """Loads, patches and starts every configured model; ``close`` undoes all of it."""

    def __init__(self, settings: Settings, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._stack = ExitStack()
        self._models: dict[str, ServedModel] = {}
        self._left: dict[torch.device, int] = {}
        self._grace_s = settings.shutdown_grace_s
        try:
            check(settings)
            refuse_undivided(settings)
            leader = self._stack.enter_context(leading(settings)) if settings.tensor_parallel > 1 else None
            for group in started(settings):
                for number, start in enumerate(group):
                    ready = self._stack.enter_context(start)
                    if leader is not None:
                        leader.lead(ready.patch)
                    self._add(ready, settings, among=len(group) - number)
            self._fit_scores(settings)
        except BaseException:
            self.close()
            raise

    def _add(self, ready: Started, settings: Settings, *, among: int) -> None:
        """Serve one of ``among`` models whose caches divide the free memory. One that is only scored has no cache."""
        checkpoint, patch, choice = ready.checkpoint, ready.patch, ready.choice
        free, padded = self._free_bytes(patch.model.device), choice.kind == "padded"
        tokens = cache_tokens(patch, settings, free, among, padded=padded) if choice.generates else 0
        limits = EngineLimits(
            cache_tokens=tokens,
            max_length=settings.max_length or max(tokens, CPU_REACH * patch.geometry.original_max_position_embeddings),
            score_tokens=settings.score_tokens or MOST_TOKENS,
            page_size=settings.page_size,
            max_batch_tokens=settings.max_batch_tokens,
            max_requests_per_batch=min(settings.max_requests_per_batch, settings.max_batch_tokens),
            max_queue=settings.max_queue,
            max_queue_tokens=settings.max_queue_tokens,
            stall_timeout_s=settings.stall_timeout_s,
            prefix_sharing=settings.prefix_sharing,
            shared=settings.has_keys,
        )
        cache = cache_bytes(tokens, patch)
        self._left[patch.model.device] = max(0, free - reserved_bytes(cache, padded=padded))
        if choice.generates:
            by = "default" if settings.cache_tokens is None else "ROPEWAY_CACHE_TOKENS"
            log.info("cache_reserved", model=checkpoint.name, tokens=tokens, mib=cache >> 20, by=by)
        else:
            log.warning("scored_only", model=checkpoint.name, reason=choice.reason)
        window = patch.smallest_window
        if window is not None and window >= (checked := checked_length(patch)):
            log.info("window_beyond_the_check", model=checkpoint.name, window=window, checked_tokens=checked)
        if choice.generates and choice.reason is not None:
            log.info("slower_engine", model=checkpoint.name, engine=str(choice), reason=choice.reason)
        metrics = EngineMetrics(self._metrics, checkpoint.name)
        engine = Engine(patch, limits, _eos_token_ids(checkpoint.model, patch.num_logits), metrics, choice)
        self._stack.callback(engine.thread.stop, self._grace_s)
        max_length, bound = _max_length(checkpoint.name, engine, settings)
        self._models[checkpoint.name] = ServedModel(
            name=checkpoint.name,
            contents=ready.contents,
            fingerprint=ready.fingerprint,
            patch=patch,
            engine=engine,
            tokenizer=checkpoint.tokenizer,
            max_length=max_length,
            bound=bound,
            memory=self._memory(checkpoint, cache),
            base=checkpoint.base,
            quantization=checkpoint.quantization,
            score_chunk=settings.score_chunk,
        )

    def _free_bytes(self, device: torch.device) -> int:
        """Bytes of a device that no model has reserved. Pages that are allocated lack in those that are free."""
        untouched = [
            reserved_bytes(served.memory.cache, padded=served.engine.choice.kind == "padded")
            for served in self
            if served.patch.model.device == device and not served.engine.has_pages()
        ]
        return max(0, free_bytes(device) - sum(untouched))

    def _fit_scores(self, settings: Settings) -> None:
        """Bound the passes of every model, now that all are loaded. Those of a device share its memory."""
        by = "default" if settings.score_tokens is None else "ROPEWAY_SCORE_TOKENS"
        pools = {device: Pool(score_bytes(left)) for device, left in self._left.items()}
        for name, served in self._models.items():
            device = served.patch.model.device
            tokens = score_tokens(served.patch, pools[device].capacity, settings)
            served.engine.scores.join(pools[device], score_bytes_per_token(served.patch), tokens)
            served.score_room = self._left[device]
            log.info("scores_bounded", model=name, tokens=tokens, by=by)
            if tokens < min(served.trained_length, settings.score_tokens or MOST_TOKENS):
                log.warning("little_memory_for_evaluations", model=name, tokens=tokens)

    def _memory(self, checkpoint: Checkpoint, cache: int) -> Memory:
        own = places(checkpoint.model)
        of_base = places(self._models[checkpoint.base].patch.model) if checkpoint.base else {}
        return Memory(sum(own.values()), sum(size for address, size in own.items() if address in of_base), cache)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def are_generating(self) -> bool:
        """True while a generation runs."""
        return any(served.engine.thread.is_generating for served in self)

    @property
    def default(self) -> ServedModel:
        return next(iter(self._models.values()))

    def get(self, name: str | None, param: str = "model") -> ServedModel:
        """The model called ``name``, which came in the field ``param``, or the default one.

        Raises:
            UnknownModel: naming those that are served.
        """
        if name is None:
            return self.default
        if name not in self._models:
            raise UnknownModel(name, list(self._models), param)
        return self._models[name]

    def for_method(self, model: ServedModel, method: Method) -> ServedModel:
        """The variant of ``model`` trained for ``method``, if it declares one that is served and the
        request lets it; ``model`` itself otherwise."""
        wanted = method.variant is not None and getattr(method, "use_variant", True)
        name = model.variants.get(method.variant or "") if wanted else None
        return self._models.get(name, model) if name else model

    def stop(self) -> None:
        """End the generation threads now and fail what they were doing. Blocks for a step; safe to repeat."""
        for served in self:
            served.engine.thread.stop(grace_s=0.0)

    def close(self) -> None:
        """Stop the engines and restore the models."""
        self._stack.close()


def _max_length(name: str, engine: Engine, settings: Settings) -> tuple[int, str]:
    """The most tokens of a request, prompt included: as configured, else as many as the cache fits. With it comes
    the setting that gives it.

    Layers that keep a window only may have room for any text: a default goes no further than encodings do. A model that
    is only scored has no cache.

    Raises:
        ModelLoadError: when a cache of a configured size, smaller than ``max_length``, has no room for it. Also when it
            has none for a token.
    """
    room = engine.longest if engine.choice.generates else MAX_POSITION + 1
    asked, tokens = settings.max_length, engine.limits.cache_tokens
    if not room:
        least = engine.reserved(1)
        raise ModelLoadError(
            f"ROPEWAY_CACHE_TOKENS: a cache of {tokens} fits no request of {name}: one token takes {least}"
        )
    if asked is not None and asked > room:
        if settings.cache_tokens is not None and asked > tokens:
            raise ModelLoadError(
                f"ROPEWAY_MAX_LENGTH: {asked} tokens of {name} do not fit into ROPEWAY_CACHE_TOKENS ({tokens}): {room} "
                "is the most"
            )
        log.warning("max_length_beyond_the_cache", model=name, max_length=asked, room=room)
    most = min(engine.limits.max_length or room, room)
    if most == asked == room and settings.cache_tokens is not None:
        return most, "ROPEWAY_CACHE_TOKENS and ROPEWAY_MAX_LENGTH"
    return most, "ROPEWAY_MAX_LENGTH" if most == asked or most < room else "ROPEWAY_CACHE_TOKENS"


def _eos_token_ids(model: Any, num_logits: int) -> tuple[int, ...]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)  # Qwen3-VL has none in its text part
    if eos is None:
        return ()
    listed = (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(token for token in listed if 0 <= token < num_logits)  # no answer has any other
