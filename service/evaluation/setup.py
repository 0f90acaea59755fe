"""The setup of a result: all that its numbers depend on beside the request."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from service.models.checkpoint.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from service.models.registry import ModelRegistry

CODE = ("patches", "service.evaluation", "service.models.linear", "service.models.text", "service.engine.padded")
"""Packages whose sources decide outcomes."""


class ModelSetup(Numerics):
    """A model as it computed."""

    fingerprint: str = Field(description="SHA-256 of its configuration and weights, as in `GET /models`.")
    score_chunk: int | None = Field(description="`ROPEWAY_SCORE_CHUNK`; null is as many tokens as suit the device.")
    tokenizer: str = Field(description="SHA-256 of the tokenizer: vocabulary, rules, special tokens and chat template.")
    eos_token_ids: list[int] = Field(description="Tokens that end an answer.")
    quantization: str | None = Field(None, description="Scheme of its weights; earlier results have none.")


class Setup(BaseModel):
    """Equal requests have equal numbers, to the bit, if the setup is equal and ``auto`` chooses the same."""

    ropeway: str
    code: str = Field(description="SHA-256 of the sources that decide numbers.")
    models: dict[str, ModelSetup] = Field(description="The served models that answered, by name.")


def setup_of(names: Iterable[str], models: ModelRegistry) -> Setup:
    """The setup of this process for the models with these ``names``."""
    found = {}
    for name in sorted(set(names)):
        served = models.get(name)
        found[name] = ModelSetup(
            fingerprint=served.contents,
            **served.numerics.model_dump(),
            score_chunk=served.score_chunk,
            tokenizer=served.tokenizer_hash,
            eos_token_ids=list(served.engine.eos_token_ids),
            quantization=served.quantization and served.quantization.scheme,
        )
    return Setup(ropeway=version("ropeway"), code=code_version(), models=found)


@lru_cache(maxsize=1)
def code_version() -> str:
    """SHA-256 of the sources of ``CODE``, as they were when this process asked first."""
    return hash_of_sources([folder_of(package) for package in CODE])


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(package)
    return Path(next(iter(spec.submodule_search_locations)))


def hash_of_sources(folders: list[Path]) -> str:
    """SHA-256 of every Python file below ``folders``, names and contents."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            contents = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {contents}\n".encode())
    return found.hexdigest()
