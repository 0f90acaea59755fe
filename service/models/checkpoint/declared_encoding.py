"""The encoding and the trained length that the folder of an adapter declares, in the form of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patches import (
    OWN,
    RopeGeometry,
    geometry_of,
    in_configuration,
    is_by_layer,
    is_trained_at_its_length,
    of_today,
    resolve,
)
from service.models.checkpoint.configuration import FILE, LENGTH, LENGTH_BEFORE, length_of, refuse_a_base


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        ValueError: when it is no JSON, or no object.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"its {file.name} is no JSON object")
    return content


def declare_encoding(model: Any, folder: Path) -> None:
    """Set the encoding and the trained length of the adapter's folder, if it has any, in the model's configuration.

    Factors are relative to the length before any scaling: that of the base, unless the folder declares another.

    Raises:
        ValueError: when they are no encoding of this model. The message names the field.
    """
    file = folder / FILE
    declared = read_object(file) if file.is_file() else {}
    parameters, length = _parameters(declared), _length(declared, LENGTH)
    if parameters is None and length is None:
        return
    config, geometry = model.config.get_text_config(), geometry_of(model)
    before = getattr(config, LENGTH, None)
    if parameters is not None:
        own = getattr(config, "rope_parameters", None)
        if not isinstance(own, dict):
            raise ValueError(f"its {FILE} declares rope_parameters, and its base has none")
        config.rope_parameters, length = _completed(parameters, declared, own, geometry)
    if length is not None:
        config.max_position_embeddings = length
    _refuse_what_does_not_fit(model, None if length == before else length)
    _rotate_by(config, model)


def _parameters(declared: Mapping[str, Any]) -> dict[str, Any] | None:
    """The declared ``rope_parameters``, None where the file says nothing of rotation.

    Until transformers 5, ``rope_scaling`` was their name, and ``rope_theta`` was beside it. A base alone is rotation
    without any scaling.
    """
    parameters = declared.get("rope_parameters") or declared.get("rope_scaling")
    if not parameters:
        return None if declared.get("rope_theta") is None else of_today({})
    if not isinstance(parameters, dict):
        raise ValueError(f"its {FILE} has rope_parameters that are no object")
    with _of_the_file():
        if is_by_layer(parameters):
            return {name: of_today(value) if isinstance(value, dict) else value for name, value in parameters.items()}
        return of_today(parameters)


def _completed(
    parameters: dict[str, Any], declared: Mapping[str, Any], own: Mapping[str, Any], of_base: RopeGeometry
) -> tuple[dict[str, Any], int | None]:
    """The parameters with the base and the trained length that they leave out, and the configuration's length."""
    length = _length(declared, LENGTH)
    if is_by_layer(parameters):
        with _of_the_file():
            for value in parameters.values():
                if isinstance(value, dict):
                    refuse_a_base(value.get("rope_theta"))
        return parameters, length
    at_its_length = is_trained_at_its_length(parameters)
    before = _length(declared, LENGTH_BEFORE) or (length if at_its_length else None)
    theta = declared.get("rope_theta")
    known = {
        "rope_theta": of_base.rope_theta if theta is None else theta,
        LENGTH_BEFORE: before or of_base.original_max_position_embeddings,
    }
    complete = known | {name: value for name, value in parameters.items() if value is not None}
    with _of_the_file():
        refuse_a_base(complete["rope_theta"])
    trained = _length(complete, LENGTH_BEFORE)
    return in_configuration(complete, own), trained if length is None and at_its_length else length


def _length(declared: Mapping[str, Any], name: str) -> int | None:
    with _of_the_file():
        return length_of(declared, name)


@contextmanager
def _of_the_file() -> Iterator[None]:
    """Raises:
    ValueError: as inside, with the name of the file.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"its {FILE}: {error}") from error


def _refuse_what_does_not_fit(model: Any, length: int | None) -> None:
    """``length`` is the declared one, if it is new.

    Raises:
            ValueError: when the encoding does not exist or does not fit the model, or its weights have another length.
    """
    try:
        geometry = geometry_of(model)
        resolve(OWN, geometry, geometry.original_max_position_embeddings)
    except ValueError as error:
        raise ValueError(f"its {FILE} declares an encoding that cannot be served: {error}") from error
    if length is not None and (geometry.adds_positions or geometry.max_position_embeddings != length):
        raise ValueError(f"its {FILE} has {LENGTH} {length}, and the length of its base is in its weights or its class")


def _rotate_by(config: Any, model: Any) -> None:
    """Build the rotary modules again, as transformers builds them for this configuration."""
    try:
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if any(buffer.endswith("inv_freq") for buffer in module._buffers):
                    setattr(parent, name, type(module)(config).to(model.device))
    except Exception as error:  # it reads more than we do, and the layers whose encoding no request chooses
        reason = f"{error} is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"its {FILE} has rope_parameters by which transformers cannot rotate: {reason}") from error
