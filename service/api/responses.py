"""Responses of Ropeway's own routes. Clients import them without the rest of the service."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.jobs.records import JobInfo, UnitDone


class Alternative(BaseModel):
    token_id: int
    token: str
    logprob: float


class TokenLogprob(Alternative):
    top: list[Alternative]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Timings(BaseModel):
    """Seconds waiting, until the first token, and for the rest."""

    queue_s: float
    prefill_s: float
    decode_s: float


class AutoOrigin(BaseModel):
    """Origin of the ranges of ``auto``: the rule, the operator's policy file, the tenant's calibration, or the request.

    ``calibration`` is the id of its job, ``created`` its time.
    """

    source: Literal["rule", "file", "calibration", "request"]
    calibration: str | None
    created: str | None


class AutoChoice(AutoOrigin):
    """The choice of ``auto``: the encoding of reserved lengths beyond ``above`` and up to ``up_to`` tokens; null is no
    end."""

    above: int
    up_to: int | None


class AutoRange(BaseModel):
    """An encoding, and the longest reserved length that it has in tokens; null is no end."""

    up_to: int | None
    pe: dict[str, Any]


class AutoRanges(AutoOrigin):
    """The encodings of ``auto`` by reserved length."""

    ranges: list[AutoRange]


class PolicyCalibration(BaseModel):
    """The measurement behind a policy: the result's id, the time, and the answer in sentences."""

    id: str | None
    created: datetime
    measured: Any


class PolicyInfo(BaseModel):
    """A policy of ``auto``, as a policy file has it. ``notes`` are cautions about its use on this server."""

    version: int
    model: str
    fingerprint: str
    trained_length: int
    ranges: list[AutoRange]
    calibration: PolicyCalibration
    notes: list[str] = []


class ResultEnd(BaseModel):
    """The end of one prompt under one encoding: the last event of its stream. ``pe`` is the encoding as it took
    effect, ``auto`` the choice of that request."""

    index: int
    prompt_index: int
    model: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    usage: Usage
    timings: Timings
    pe: dict[str, Any]
    auto: AutoChoice | None = None


class Result(ResultEnd):
    """One prompt under one encoding. ``pe`` is the encoding as it took effect, ``auto`` the choice of that request."""

    text: str
    token_ids: list[int]


class GenerateResponse(BaseModel):
    model: str
    results: list[Result]
    usage: Usage


class TextDelta(BaseModel):
    """New text and tokens of the result ``index`` since the last event.

    ``logprobs`` are those of ``token_ids``, in requests for log-probabilities.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class PrefillProgress(BaseModel):
    """Prompt tokens of the result ``index`` read so far."""

    index: int
    prompt_tokens_done: int
    prompt_tokens_total: int


class ParameterInfo(BaseModel):
    """One parameter of a method. ``type`` has its range or its values in words."""

    name: str
    type: str
    required: bool
    default: Any


class MethodSummary(BaseModel):
    """One method in short. ``kind`` is what it changes, ``family`` what a checkpoint counts as that was trained with
    it; ``questions`` are those that the method answers."""

    method: str
    kind: str
    family: str
    summary: str
    questions: list[str]
    parameters: list[ParameterInfo]


class MethodList(BaseModel):
    methods: list[MethodSummary]


class MethodInfo(BaseModel):
    """One method: what it does, what it is for, and what it costs.

    It has the JSON schema of its parameters with defaults. ``reach`` is the length that it can serve, L0 the trained
    one; ``family`` is what a checkpoint counts as that was trained with it.
    """

    method: str
    kind: str
    family: str
    summary: str
    formula: str
    use: str
    avoid: str
    reach: str
    training_free: str
    evidence: str
    paper: str
    cost: str
    rotates_at: str
    parameters: dict[str, Any]


class FullMethodList(BaseModel):
    methods: list[MethodInfo]


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


class UnitList(BaseModel):
    """Finished units of a job, in the order of finishing."""

    units: list[UnitDone]


class JobList(BaseModel):
    """Newest first; ``before`` the last one's id gives the next."""

    jobs: list[JobInfo]


class PlanInfo(BaseModel):
    """Units of an evaluation, and tokens that their passes read; both are the most for an evaluation in stages."""

    units: int
    tokens: int


class Live(BaseModel):
    status: str


class Ready(BaseModel):
    """Per model: requests running and waiting, scoring jobs, cache in use, engine restarts."""

    status: str
    jobs: Literal["ok", "out_of_reach"] = Field(
        "ok", description="`out_of_reach` while the database of jobs does not answer or takes no writes: jobs wait."
    )
    models: dict[str, dict[str, int]]


class ExportResult(BaseModel):
    """An encoding in the syntax of another system, by the sources of its ``version``.

    ``config`` has the entries of the checkpoint's ``config.json``, ``arguments`` the options of the command; ``usage``
    is a whole line. ``changes`` is false for the checkpoint's own encoding. ``exact`` is false where ``differences``
    has the differences to the encoding here. ``notes`` are on the line: what an adapter needs.
    """

    target: str
    version: str
    documentation: str
    model: str
    pe: dict[str, Any]
    length: int
    exact: bool
    changes: bool
    config: dict[str, Any]
    arguments: list[str]
    usage: str
    apply: str
    differences: list[str]
    notes: list[str]


class ErrorInfo(BaseModel):
    """``param`` is the field at fault; further keys hold numbers, as of a context that is too long."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every refusal and failure, as an answer and as an event of a stream."""

    error: ErrorInfo


WHAT_FAILS: dict[int, str] = {
    400: "The request cannot be answered as it is; `param` names the field and `message` what is allowed.",
    401: "No valid API key.",
    404: "No such model, alias, method or result.",
    413: "The body is larger than this server takes.",
    429: "The queue is full, or the API key has used up its share: come back after `Retry-After`.",
    503: "Not now: starting, shutting down, or short of memory beside others.",
    504: "Not finished within the request's `timeout_s`.",
    507: "Out of memory with nothing else running: make the request smaller.",
}
"""Meanings of the statuses of refusals and failures."""

COMES_BACK = {"Retry-After": {"description": "Seconds after which to ask again.", "schema": {"type": "integer"}}}


def failures(statuses: Iterable[int] = WHAT_FAILS) -> dict[int | str, dict[str, Any]]:
    """Documentation of ``statuses``, and of any other failure: FastAPI would document its own 422, which this
    server never answers.

    One of them has the model. FastAPI builds it again for each route and status, in half of a server's first answer.
    """
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}}}
    documented: dict[int | str, dict[str, Any]] = {
        status: {
            "description": WHAT_FAILS[status],
            **({"headers": COMES_BACK} if status in (429, 503) else {}),
            "content": content,
        }
        for status in statuses
    }
    return {**documented, "default": {"model": ErrorResponse, "description": "Any other failure, in the same shape."}}
