"""The ``.env`` file of the working directory, of which the environment gets all but the server's settings."""

from __future__ import annotations

import os
from pathlib import Path

import dotenv

PREFIX = "ROPEWAY_"
OF_CLIENTS = {"ROPEWAY_URL", "ROPEWAY_API_KEY"}
"""Variables of the client, which may run in the same shell."""

FILE = Path(".env")


class UnreadableFile(ValueError):
    """The ``.env`` file cannot be read, or is no text; the message names it."""


def values() -> dict[str, str | None]:
    """Values of the file by name; none without a file.

    Raises:
        UnreadableFile: when the file is not in UTF-8, or closed to this user.
    """
    try:
        return dotenv.dotenv_values(FILE)
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{FILE.absolute()}: not in UTF-8, at byte {error.start + 1}") from None
    except OSError as error:
        raise UnreadableFile(f"{FILE.absolute()}: {error.strerror}") from None


def load() -> None:
    """Put variables of libraries and of the client into the environment, where these are not set.

    ``Settings`` reads its own from the file. So the server's API keys stay out of the environment, which child
    processes inherit.

    Raises:
        UnreadableFile: as ``values``.
    """
    for name, value in values().items():
        if value is not None and (name in OF_CLIENTS or not name.upper().startswith(PREFIX)):
            os.environ.setdefault(name, value)
