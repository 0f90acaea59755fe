"""A policy as a JSON file: the encodings of one model by reserved length, and the calibration that chose them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field, JsonValue, ValidationError

from patches import KnownFields, problems_of
from service.policy.auto import TAGS, Auto, Origin, Ranges


class InvalidPolicy(ValueError):
    """The policy cannot be used; the message names the file or the field, and the reason."""


class Calibration(KnownFields):
    """The measurement behind a policy. ``id`` is its job, if there is one."""

    model_config = ConfigDict(frozen=True)

    id: str | None = None
    created: Annotated[AwareDatetime, Field(strict=False)]
    measured: JsonValue = Field(None, description="The evidence, as the calibration wrote it.")


class Policy(KnownFields):
    """Encodings of one model by reserved length. ``fingerprint`` is the hash of its configuration and weights."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1]
    model: Annotated[str, Field(min_length=1)]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    trained_length: Annotated[int, Field(ge=1)]
    ranges: Ranges
    calibration: Calibration
    notes: tuple[str, ...] = Field(
        (), strict=False, description="The measured text, and cautions of the server that answered; without effect."
    )

    def auto(self, source: Literal["file", "calibration"]) -> Auto:
        """The method that chooses by this policy."""
        of = self.calibration
        return Auto(ranges=self.ranges, origin=Origin(source=source, calibration=of.id, created=of.created.isoformat()))


def read_policies(path: Path | None) -> dict[Path, Policy]:
    """The policy of a file, or those of the ``*.json`` files of a folder; none without a path.

    Raises:
        InvalidPolicy: when a file cannot be read or is no policy, or the folder has none.
    """
    if path is None:
        return {}
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise InvalidPolicy(f"ROPEWAY_POLICY: the folder {path} has no *.json file")
    return {file: _read(file) for file in files}


def _read(file: Path) -> Policy:
    try:
        return parse_policy(json.loads(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise InvalidPolicy(f"ROPEWAY_POLICY: {file}: {error}") from error


def parse_policy(fields: object) -> Policy:
    """Raises:
    InvalidPolicy: naming every wrong field and the allowed values.
    """
    try:
        return Policy.model_validate(fields)
    except ValidationError as error:
        raise InvalidPolicy("; ".join(map(str, problems_of(error.errors(), TAGS)))) from None
