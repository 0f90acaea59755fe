"""``ROPEWAY_*`` variables that are no setting: nothing would read them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from service import env_file
from service.env_file import OF_CLIENTS, PREFIX
from service.settings import Settings

LIKE = 0.85
"""Names this alike are one with slips. Kubernetes adds variables of services, which are less alike."""


def given() -> set[str]:
    """Names in the environment and the ``.env`` file that begin like a setting's.

    Raises:
        UnreadableFile: when the file cannot be read.
    """
    names = {name.upper() for name in (*os.environ, *env_file.values())}
    return {name for name in names if name.startswith(PREFIX)}


def unknown() -> list[str]:
    """Those ``given`` that neither the server nor the client reads."""
    return sorted(given() - {PREFIX + name.upper() for name in Settings.model_fields} - OF_CLIENTS)


def misspelt(names: Iterable[str]) -> list[str]:
    """A sentence for each of ``names`` that is almost a setting's."""
    settings = [name.upper() for name in Settings.model_fields]
    found = {name: _alike(name.removeprefix(PREFIX), settings) for name in names}
    return [f"{name}: no setting; is it {PREFIX}{alike}?" for name, alike in found.items() if alike]


def _alike(name: str, settings: list[str]) -> str | None:
    one = next((setting for setting in settings if _is_one_slip(name, setting)), None)
    return one or next(iter(difflib.get_close_matches(name, settings, 1, LIKE)), None)


def _is_one_slip(a: str, b: str) -> bool:
    """True if one letter is another, too many or missing, or two neighbours changed places."""
    start = next((at for at, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    swapped = b[1:2] + b[:1] + b[2:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or a == swapped
