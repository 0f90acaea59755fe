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
    from service.cli.commands import app as commands

    try:
        return commands(arguments, **options)
    finally:
        sys.stdout.flush()  # Python would end with another word and code
