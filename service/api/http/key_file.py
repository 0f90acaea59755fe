"""The file of hashes as ``ropeway keys`` keeps it, with one hash a line.

After a # come the day when the key was made, and its owner. The file is replaced as a whole, never changed in place. A
server that reads it meanwhile sees the old file or the new one. Keys are long and random, so a plain hash is enough:
there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from service.machine.files import replacement

SHOWN = 16
"""Digits of a hash that logs and metrics know a key by."""

LEAST = 6
"""Digits of a hash that are taken for a name of it."""


class InvalidKeyFile(ValueError):
    """The file of hashes cannot be used; the message names the line."""


class UnknownKey(LookupError):
    """No key, or more than one, is called like this."""


@dataclass(frozen=True)
class KeyLine:
    """One key of a file. ``created`` is None where the file has no date."""

    digest: str
    created: date | None
    name: str

    @classmethod
    def parse(cls, line: str) -> KeyLine | None:
        """None for a line without a hash."""
        digest, _, comment = line.partition("#")
        if not digest.strip():
            return None
        first, _, rest = comment.strip().partition(" ")
        try:
            return cls(digest.strip().lower(), date.fromisoformat(first), rest.strip())
        except ValueError:
            return cls(digest.strip().lower(), None, comment.strip())

    def __str__(self) -> str:
        return f"{self.digest}  # {self.created or ''} {self.name}".rstrip()


def new_key() -> tuple[str, str]:
    """(a new API key, its hash)."""
    key = f"rw-{secrets.token_urlsafe(32)}"
    return key, hash_of(key)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_hashes(path: Path) -> tuple[str, ...]:
    """The hashes in a file: one a line, blank lines and what follows a # left out.

    Raises:
        InvalidKeyFile: when it cannot be read or a line is no SHA-256 in hexadecimal.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidKeyFile(f"the file of API keys cannot be read: {error}") from error
    hashes = [line.partition("#")[0].strip().lower() for line in lines]
    for number, text in enumerate(hashes, 1):
        if text and not re.fullmatch(r"[0-9a-f]{64}", text):
            raise InvalidKeyFile(f"{path}, line {number}: not a SHA-256 in hexadecimal (`ropeway keys new` prints one)")
    return tuple(text for text in hashes if text)


def read(path: Path) -> list[KeyLine]:
    """The keys of a file, in its order.

    Raises:
        InvalidKeyFile: when it cannot be read or a line is no hash.
    """
    read_hashes(path)
    return [key for line in path.read_text(encoding="utf-8").splitlines() if (key := KeyLine.parse(line)) is not None]


@contextmanager
def adding(path: Path, key: KeyLine) -> Iterator[None]:
    """Put a key at the end of a file, which is made when there is none. The key counts from the end of the ``with`` on:
    an exception inside leaves the file as it was.

    Raises:
        InvalidKeyFile: when what is there is no file of hashes; OSError when it cannot be written.
    """
    lines: list[str] = []
    if path.exists():
        read_hashes(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    with _replacement(path, [*lines, str(key)]):
        yield


def revoke(path: Path, which: str) -> KeyLine:
    """Take out the key with this name, or whose hash begins like this.

    Raises:
        InvalidKeyFile: when the file cannot be read; UnknownKey when not exactly one key is meant.
    """
    wanted = which.strip()
    found = [key for key in read(path) if _is_meant(key, wanted)]
    if len(found) != 1:
        raise UnknownKey(f"{len(found) or 'no'} keys in {path} are called {which!r}: `ropeway keys list` shows them")
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if (key := KeyLine.parse(line)) is None or key.digest != found[0].digest]
    with _replacement(path, kept):
        return found[0]


def _is_meant(key: KeyLine, wanted: str) -> bool:
    return key.name == wanted != "" or (len(wanted) >= LEAST and key.digest.startswith(wanted.lower()))


def _replacement(path: Path, lines: list[str]) -> AbstractContextManager[None]:
    """A new file is its owner's alone."""
    return replacement(path, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)
