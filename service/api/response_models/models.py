"""Answers about served models, and about the server's health."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.api.response_models.encodings import AutoRanges


class QuantizationInfo(BaseModel):
    """``scheme`` is int8, int4 or the method of the checkpoint. ``layers`` counts those quantized at load by format."""

    scheme: str
    layers: dict[str, int]


class MemoryInfo(BaseModel):
    """Bytes of the weights, of those among them that an adapter shares with its base, and of the cache."""

    weights: int
    shared: int
    cache: int


class ModelInfo(BaseModel):
    """A served model and its limits, in tokens. ``variants`` maps a kind of training to a served model.

    ``base`` is the model that an adapter was trained on; null for other models.

    ``fingerprint`` is the hash of its configuration and weights, for policies. ``auto`` is null if the database is out
    of reach, or has a policy of another version. ``engine`` is ``paged``, or ``padded`` with the reason, for a model
    that pages cannot cache. The padded engine shares no prefixes. ``attention`` is that of generation: ``triton`` or
    ``eager`` over block tables, or ``segments``, one sequence after another. If a model has another attention than the
    setting asks for, ``engine_reason`` says why. With ``cuda_graphs``, decode steps are captured and replayed, or
    ``engine_reason`` says why not. With ``recorded_steps``, those of ``segments`` on a CPU run from a list of their
    calls of torch. They run without the Python of the model. ``tensor_parallel`` processes compute the model together,
    and ``memory`` is that of one of them. ``products`` are those of linear layers on a CPU other than torch's, with the
    rows up to which they are taken: "512x2048: by_groups up to 1, by_onednn".
    """

    id: str
    default: bool
    architecture: str
    fingerprint: str
    parameters: int
    vocab_size: int
    trained_length: int
    window: int | None = Field(
        None, description="Tokens that the layers rotated by requests attend to, where all have a window or a chunk."
    )
    max_length: int
    pe: dict[str, Any]
    auto: AutoRanges | None = None
    variants: dict[str, str]
    device: str
    dtype: str
    engine: Literal["paged", "padded", "none"]
    engine_reason: str | None
    tensor_parallel: int
    attention: Literal["triton", "eager", "segments"]
    cuda_graphs: bool
    recorded_steps: bool
    base: str | None = None
    quantization: QuantizationInfo | None = None
    packed_weights: bool
    products: list[str]
    memory: MemoryInfo


class ModelList(BaseModel):
    models: list[ModelInfo]


class Live(BaseModel):
    status: str


class Ready(BaseModel):
    """Per model: requests running and waiting, scoring jobs, cache in use, engine restarts."""

    status: str
    jobs: Literal["ok", "out_of_reach"] = Field(
        "ok", description="`out_of_reach` while the database of jobs does not answer or takes no writes: jobs wait."
    )
    models: dict[str, dict[str, int]]
