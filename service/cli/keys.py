"""``ropeway keys``: creates, lists and revokes API keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from service.cli.shared.commands import Commands
from service.cli.shared.terminal import fail, new_table, print_table, stderr, stdout
from service.evaluation.formatting import printable

keys = Commands(help="API keys: new, list, revoke.", no_args_is_help=True)

File = Annotated[
    Path | None,
    typer.Option(help="The file of hashes, a server's api_keys_file.", show_default="ROPEWAY_API_KEYS_FILE"),
]


@keys.command("new")
def new(
    name: Annotated[str, typer.Argument(help="The key's owner, a comment beside the hash.")] = "", file: File = None
) -> None:
    """Create an API key and print it once, on stdout. Its hash goes into the file, or to stderr without one."""
    from service.api.http import key_file

    key, digest = key_file.new_key()
    line = key_file.KeyLine(digest, datetime.now(UTC).date(), " ".join(printable(name).split()))
    path = _configured(file)
    if path is None:
        stderr.print(f"for the file of hashes: {line}", soft_wrap=True, markup=False, highlight=False)
        typer.echo(key)
        return
    with _failures(path), key_file.adding(path, line):
        typer.echo(key)  # a key that nobody has seen must not count


@keys.command("list")
def list_keys(file: File = None) -> None:
    """The keys of a file: the start of each hash as in the logs, the date, and the owner."""
    from service.api.http import key_file

    table, path = new_table("key", "made", "name"), _needed(file)
    with _failures(path):
        for key in key_file.read(path):
            table.add_row(key.digest[: key_file.SHOWN], str(key.created or "-"), Text(printable(key.name)))
    print_table(table)


@keys.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its name, or the first digits of its hash.")],
    file: File = None,
) -> None:
    """Remove a key from the file. A running server that reads the file then refuses the key. Jobs of the key
    wait, also half-way, until it is in the file again."""
    from service.api.http import key_file

    path = _needed(file)
    with _failures(path):
        gone = key_file.revoke(path, key)
    stdout.print(Text(f"revoked {gone.digest[: key_file.SHOWN]} {printable(gone.name)}".rstrip()))


def _configured(file: Path | None) -> Path | None:
    """``file``, else the file of the settings."""
    if file is not None:
        return file
    from service.cli.server import StartFailed, settings_with

    try:
        return settings_with().api_keys_file
    except StartFailed as error:
        fail(str(error))


def _needed(file: Path | None) -> Path:
    """Raises:
    typer.BadParameter: when neither the option nor the settings name a file.
    """
    path = _configured(file)
    if path is None:
        raise typer.BadParameter("name the file of hashes, or set ROPEWAY_API_KEYS_FILE", param_hint="--file")
    return path


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """An error with the file ``path`` ends the command with one line."""
    from service.api.http.key_file import InvalidKeyFile, UnknownKey

    try:
        yield
    except (InvalidKeyFile, UnknownKey) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{path}: {error.strerror}")  # the error has the name of a file beside it
