"""Files that are replaced as a whole. A reader, a full disk or a kill meets the old content or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Give the file ``path`` this content; a new file has the usual permissions."""
    with replacement(path, content):
        pass


@contextmanager
def replacement(path: Path, content: bytes, mode: int = 0o666) -> Iterator[None]:
    """Inside, the new content is on the disk beside the old one, whose place it takes at the end.

    Behind a link, the file itself is replaced. The new file keeps owner and permissions; without an old one it has
    ``mode``. An exception from inside leaves the old file alone.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".ropeway-{secrets.token_hex(8)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        if target.exists():
            there = target.stat()
            os.chmod(beside, there.st_mode & 0o7777)
            for owner in ((-1, there.st_gid), (there.st_uid, -1)):
                with suppress(PermissionError):
                    os.chown(beside, *owner)
        yield
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
