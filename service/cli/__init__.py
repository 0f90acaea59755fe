"""The shell: ``ropeway serve``, ``generate``, a command per evaluation, ``scale``, ``jobs``, ``report``, ``export``,
listings. ``commands`` has them; this module imports next to nothing, so that Ctrl-C is quiet while they are imported.
"""

from __future__ import annotations

import sys

from service.cli import interrupts, output


def app(arguments: list[str] | None = None, **options: object) -> object:
    """``ropeway ARGUMENTS``, by default of this process; ``options`` are typer's."""
    output.guard()
    interrupts.be_quiet()
    _load_env_file()
    from service.cli.commands import app as commands

    try:
        return commands(arguments, **options)
    finally:
        sys.stdout.flush()  # Python would end with another word and code


def _load_env_file() -> None:
    """Before the libraries are imported, some of which read their variables as they are."""
    from service.env_file import UnreadableFile, load

    try:
        load()
    except UnreadableFile as error:
        from service.cli.shared.terminal import complain

        complain(str(error))
        raise SystemExit(1) from None
