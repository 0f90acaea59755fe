"""A server that asks for keys: Ann's and Bob's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from service.api.http.key_file import hash_of
from tests.service.serving import serving

ANN, BOB = {"Authorization": "Bearer ann-key"}, {"x-api-key": "bob-key"}
GENERATE = {"prompt": [5, 6, 7], "max_new_tokens": 2}


@pytest.fixture(scope="module")
def guarded(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FastAPI, Path]]:
    """Ann's key comes from the environment, Bob's from the file."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# keys\n\n{hash_of('bob-key')}  # bob\n")
    settings = {"api_keys": "ann-key, other-key", "api_keys_file": file, "cors_origins": "https://a.example"}
    with serving(checkpoints, **settings) as (url, app):
        yield url, app, file
