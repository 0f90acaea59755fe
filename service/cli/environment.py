"""``ROPEWAY_*`` variables that are no setting: nothing would read them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

import dotenv

from service.settings import Settings

PREFIX = "ROPEWAY_"
OF_CLIENTS = {"ROPEWAY_URL", "ROPEWAY_API_KEY"}
"""Variables of the client, which may run in the same shell."""

LIKE = 0.85
"""Names this alike are one with a slip. Kubernetes adds variables of services, which are less alike."""


def unknown() -> list[str]:
    """Names in the environment and the ``.env`` file that begin like a setting's and are none."""
    file = str(Settings.model_config["env_file"])
    names = {name.upper() for name in (*os.environ, *dotenv.dotenv_values(file))}
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(name for name in names - settings - OF_CLIENTS if name.startswith(PREFIX))


def misspelt(names: Iterable[str]) -> list[str]:
    """A sentence for each of ``names`` that is almost a setting's."""
    settings = [name.upper() for name in Settings.model_fields]
    found = {name: difflib.get_close_matches(name.removeprefix(PREFIX), settings, 1, LIKE) for name in names}
    return [f"{name}: no setting; is it {PREFIX}{alike[0]}?" for name, alike in found.items() if alike]
