"""Errors of the libraries that read a checkpoint, in one line."""

from __future__ import annotations

import traceback
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from service.models.checkpoint.hub import NotOnHub

SPEAKING = (OSError, ValueError, ImportError, NotOnHub, SafetensorError, StrictDataclassError)
"""Errors whose message says enough by itself."""


def reason_of(error: Exception) -> str:
    """An error in one line, without advice to run code. An unexpected one has its class and its place."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return "it needs custom code, which is not run"
    if isinstance(error, SPEAKING) and said:
        return said
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__} in {file}, line {place.lineno}: {said}".removesuffix(": ")
