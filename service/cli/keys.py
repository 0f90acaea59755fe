"""``ropeway keys``: a new API key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.terminal import stderr


def keys(
    name: Annotated[str, typer.Argument(help="Whose key it is, for a comment beside the hash.")] = "",
    file: Annotated[
        Path | None, typer.Option(help="Append the hash to this file, the setting api_keys_file of a server.")
    ] = None,
) -> None:
    """Make an API key. The key is printed once, on stdout; a server needs only its hash."""
    from service.api.access import new_key

    key, digest = new_key()
    line = f"{digest}  # {name}" if name else digest
    typer.echo(key)
    if file is None:
        stderr.print(f"for the file of hashes: {line}", soft_wrap=True, markup=False, highlight=False)
    else:
        with file.open("a", encoding="utf-8") as hashes:
            hashes.write(f"{line}\n")
