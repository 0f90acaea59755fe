"""Answers about encodings: ``auto``, policies, methods and exports."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel


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
