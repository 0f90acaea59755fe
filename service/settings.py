"""Every setting of the server, from ``ROPEWAY_*`` environment variables or a ``.env`` file."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.addresses import api_key, http_url, origins
from service.env_file import FILE, PREFIX

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _items(value: object) -> object:
    return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value


def _hashes(value: object) -> object:
    """Keys never stay in memory as they are: only their SHA-256 does.

    Raises:
        ValueError: for a text without a key, which would leave the server open, and for a refused key.
    """
    items = _items(value)
    if isinstance(value, str) and not items:
        raise ValueError("no key in it: give one, or leave the variable empty")
    if not isinstance(items, list | tuple):
        return items
    return tuple(hashlib.sha256(api_key(str(key)).encode()).hexdigest() for key in items)


def _named_folders(value: object) -> object:
    """``NAME=FOLDER`` items as a mapping.

    Raises:
        ValueError: for an item without a name or folder, and for a name that appears twice.
    """
    items = _items(value)
    if not isinstance(items, list | tuple):
        return items
    found: dict[str, str] = {}
    for item in items:
        name, _, folder = str(item).partition("=")
        if not name or not folder:
            raise ValueError(f"{item!r} is not NAME=FOLDER")
        if name in found:
            raise ValueError(f"two adapters have the name {name!r}")
        found[name] = folder
    return found


NamedFolders = Annotated[dict[str, Path], NoDecode, BeforeValidator(_named_folders)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_items), AfterValidator(origins)]
HttpUrl = Annotated[str, AfterValidator(http_url)]
HashedKeys = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_hashes)]


class Settings(BaseSettings):
    """Validated once, at start; a value out of range stops the start with its name."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=FILE, extra="ignore", frozen=True)

    model: str = Field(
        "demo",
        description="Hugging Face id, local folder, or a folder of such folders. Each folder in it is served; the "
        "first by name is the default. 'demo' serves the embedded demo models.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face id.")
    device: str = Field("auto", description="torch device; 'auto' takes CUDA if there is one, the CPU otherwise.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Weights and cache; 'auto' is bfloat16 on an accelerator and float32 on the CPU. A CPU with "
        "bfloat16 instructions is faster with it, most with several streams.",
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="Quantize the linear layers at load, with torchao (extra `quantization`)."
    )
    adapters: NamedFolders = Field(
        {},
        description="LoRA adapters as NAME=FOLDER, separated by commas. Each is served under its name, merged into a "
        "copy of the model that it was trained on.",
    )
    chat_template: str | None = Field(
        None,
        description="Chat template of every served model instead of the model's: a file, or 'plain'. The "
        "built-in 'plain' suits models without chat training.",
    )
    response_template: str | None = Field(
        None,
        description="Form of calls of tools, for every model: 'hermes', 'qwen3_coder', 'llama3_json', 'mistral', "
        "'mistral_args', 'plain' or a JSON file. The file has a response template of transformers. By default the "
        "tokenizer's own, or the one of its chat template.",
    )
    policy: Path | None = Field(
        None,
        description="Policy of `auto`: a JSON file, or a folder of such files; each is for the model that it names.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="CPU threads for the model, all ranks together; when unset, torch's choice or the CPUs that the "
        "container may use.",
    )
    time_products: bool = Field(
        False,
        description="Time the products of linear layers on a CPU again, in place of the choices that the database has.",
    )
    tensor_parallel: Count = Field(
        1, description="Processes that compute each model together, each with a part of its weights."
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: Literal["console", "json"] = Field("console", description="Lines for people, or one JSON object each.")
    log_prompts: bool = Field(False, description="Write prompts into the log.")
    max_connections: Count = Field(1000, description="Most connections; beyond it, the longest idle one is closed.")
    shutdown_grace_s: float = Field(
        10.0, ge=0, allow_inf_nan=False, description="Seconds that running requests may take to finish."
    )

    replicas: Count = Field(
        1, description="Processes on Ray Serve, each with its models (extra `scale`); one needs no Ray."
    )
    min_replicas: Count | None = Field(None, description="Least replicas with autoscaling; one when unset.")
    max_replicas: Count | None = Field(
        None, description="Most replicas: Ray Serve adds and removes them by load. No autoscaling when unset."
    )
    target_ongoing_requests: float = Field(
        32.0, gt=0, allow_inf_nan=False, description="Requests of one replica at a time that autoscaling aims at."
    )
    affinity_slack: float = Field(
        1.25,
        ge=1,
        allow_inf_nan=False,
        description="Most work of a replica, as a multiple of the mean, before requests leave the replica that has "
        "their prefix.",
    )

    max_length: int | None = Field(
        None,
        ge=2,
        description="Most tokens of one request, prompt and new together; as many as the cache fits when unset.",
    )
    max_new_tokens: Count = Field(4096, description="Most new tokens one request may ask for.")
    max_prompts: Count = Field(64, description="Most prompts in one request.")
    max_queue: Count = Field(256, description="Most requests waiting for memory before new ones get 429.")
    max_queue_tokens: Count = Field(1 << 20, description="Most tokens waiting for memory before new requests get 429.")
    max_timeout_s: Seconds = Field(3600.0, description="Most seconds one request may take; `timeout_s` asks for less.")
    send_timeout_s: Seconds = Field(60.0, description="Seconds a client may leave an answer unread before it is cut.")
    stall_timeout_s: Seconds = Field(
        120.0, description="Seconds in one step after which the generation thread counts as stalled and is replaced."
    )
    max_methods: Count = Field(64, description="Most methods in one evaluation.")
    max_lengths: Count = Field(256, description="Most lengths in one evaluation.")
    max_documents: Count = Field(256, description="Most documents in one evaluation.")
    max_scored_tokens: Count = Field(
        50_000_000, description="Most tokens that the forward passes of one evaluation may read."
    )
    max_tokens_at_once: Count = Field(
        5_000_000, description="The same for an evaluation that is no job; the smaller of the two holds."
    )
    max_passes: Count = Field(200_000, description="Most forward passes of one evaluation.")
    max_body_bytes: Count = Field(8 << 20, description="Largest request body with documents to evaluate.")
    max_prompt_bytes: Count = Field(2 << 20, description="Largest request body with prompts.")
    max_bodies_bytes: Count = Field(64 << 20, description="Bytes of request bodies in work at once.")
    max_text_bytes: Count = Field(2 << 20, description="Longest single text, and most text tokenized at once.")
    max_answer_bytes: Count = Field(32 << 20, description="Largest answer.")

    cache_tokens: int | None = Field(
        None,
        ge=64,
        description="Tokens the paged cache holds. When unset: as many as fit into 70 % of an accelerator's free "
        "memory. A model of the padded engine has half of that. On a CPU: 32 times the trained length, at most 32768 "
        "and a quarter of the free memory.",
    )
    score_tokens: Count | None = Field(
        None,
        description="Tokens that passes of evaluations may hold at once, per model; others wait. When unset: as "
        "many as fit into two thirds of the memory that weights and caches leave, at most 262144.",
    )
    page_size: int = Field(32, ge=4, le=1024, description="Tokens per page of the cache, at most `cache_tokens`.")
    max_batch_tokens: int = Field(
        1024, ge=1, le=1 << 20, description="Most tokens in one forward; longer prompts prefill in chunks."
    )
    max_requests_per_batch: Count = Field(128, description="Most requests that decode together.")
    score_chunk: Count | None = Field(
        None,
        description="Most tokens per chunk of scoring, between two generation steps. When unset: 512 on a CPU, 2048 on "
        "an accelerator.",
    )
    prefix_sharing: bool = Field(True, description="Reuse cached prefixes of requests with the same encoding.")
    attention: Literal["segments", "triton", "eager"] | None = Field(
        None,
        description="Attention of the paged engine: `segments`, one sequence after another; or all at once over "
        "block tables, by one Triton kernel (CUDA) or in plain torch (`eager`). When unset: `triton` on CUDA, else "
        "`segments`.",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="Capture decode steps as CUDA graphs, with attention `triton` on CUDA. When unset: where possible.",
    )

    database_url: str | None = Field(
        None,
        description="Database of jobs: sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME (extra `postgresql`). "
        "When unset: a file in the user's data folder.",
    )
    database_pool_size: int = Field(
        8, ge=2, le=1000, description="Connections to the database that one server keeps open; peaks take 4 more."
    )
    lease_s: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="Seconds without a sign of life after which other servers take over the work of a lost one.",
    )
    resume_jobs: bool = Field(
        True, description="Work on unfinished jobs that other processes left in the database, not only on new ones."
    )
    max_jobs: Count = Field(10_000, description="Most unfinished jobs of one API key.")
    max_job_bytes: Count = Field(64 << 20, description="Most bytes that requests of one API key's jobs take up.")
    recent_results: Count = Field(128, description="Results kept per API key beside those of jobs.")
    recent_results_bytes: Count = Field(64 << 20, description="Most bytes that these take up, per API key.")
    outcomes_max_bytes: Count = Field(
        2 << 30, description="Outcomes kept for later jobs; above it the least recently used ones leave."
    )
    jobs_kept_days: float | None = Field(
        None, gt=0, le=36500, description="Days after its end that a job and its result are removed; never when unset."
    )

    api_keys: HashedKeys = Field(
        (), description="API keys of printable ASCII, separated by commas; hashed at once. None: no keys asked for."
    )
    api_keys_file: Path | None = Field(
        None,
        description="File with the SHA-256 of one API key a line, as `ropeway keys new` writes; read again on change.",
    )
    open_docs: bool = Field(False, description="Show /docs and /openapi.json to those without an API key too.")
    key_concurrency: int | None = Field(
        None,
        ge=1,
        description="Most requests of one API key at a time, beside streams of a job's events and cancelling.",
    )
    key_tokens_per_minute: int | None = Field(
        None, ge=1, description="Most tokens of one API key in a minute: prompt and new ones, or scored ones."
    )
    shared_url: str | None = Field(
        None,
        description="Redis or Valkey where several servers count the limits per key: redis://HOST:PORT (extra "
        "`shared`).",
    )
    servers: Count = Field(1, description="Servers behind one address; several share limits per key by `shared_url`.")
    cors_origins: Origins = Field(
        (), description="Origins whose pages may call the server, as https://HOST, separated by commas; * for all."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Serve /metrics on this port of the same address instead of the main one."
    )
    otel_endpoint: HttpUrl | None = Field(
        None, description="OTLP/HTTP endpoint for traces, such as http://localhost:4318; needs the extra `otel`."
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, given: dict[str, Any]) -> dict[str, Any]:
        """As if it were set nowhere, so that an empty variable overrides ``.env``."""
        return {name: value for name, value in given.items() if value != "" or name == "api_keys_file"}

    @field_validator("api_keys_file", mode="before")
    @classmethod
    def _keys_are_named(cls, file: object) -> object:
        """Raises:
        ValueError: for an empty name, which would leave the server open.
        """
        if file == "":
            raise ValueError("empty: name a file, or set no such variable")
        return file

    @field_validator("page_size")
    @classmethod
    def _pages_fit(cls, size: int, others: ValidationInfo) -> int:
        """Raises:
        ValueError: for a page that is larger than the cache, which would have room for no request.
        """
        cache = others.data.get("cache_tokens")
        if cache is not None and size > cache:
            raise ValueError(f"at most ROPEWAY_CACHE_TOKENS ({cache}), not {size}")
        return size

    @field_validator("servers")
    @classmethod
    def _limits_are_shared(cls, servers: int, others: ValidationInfo) -> int:
        """Raises:
        ValueError: with limits per key that every server would count alone.
        """
        limits = [name for name in ("key_concurrency", "key_tokens_per_minute") if others.data.get(name)]
        if servers > 1 and limits and others.data.get("shared_url") is None:
            raise ValueError(f"{' and '.join(limits)} on {servers} servers need ROPEWAY_SHARED_URL")
        return servers

    @field_validator("metrics_port")
    @classmethod
    def _ports_differ(cls, port: int | None, others: ValidationInfo) -> int | None:
        """Raises:
        ValueError: for the main port, which only one of the two could listen on. Port 0 is a free one for each.
        """
        if port and port == others.data.get("port"):
            raise ValueError(f"another port than ROPEWAY_PORT ({port}), 0 for a free one, or unset for the main one")
        return port

    @property
    def replica_name(self) -> str | None:
        """Name of this server among several, for its metrics; None for a single one."""
        return None if self.servers == 1 else f"{socket.gethostname()}:{self.port}"

    def at_once(self) -> Settings:
        """The settings of evaluations that are answered at once."""
        tokens = min(self.max_scored_tokens, self.max_tokens_at_once)
        return self.model_copy(update={"max_scored_tokens": tokens, "max_tokens_at_once": tokens})

    @property
    def has_keys(self) -> bool:
        """True if requests carry API keys: several tenants share the server."""
        return bool(self.api_keys) or self.api_keys_file is not None
