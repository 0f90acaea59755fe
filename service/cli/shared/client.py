"""The server of a command: a named one, or one started for the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from service.cli import interrupts
from service.cli.shared.terminal import fail, loading

if TYPE_CHECKING:
    from service.client import Ropeway

FOR_ONE_COMMAND = {"api_keys": (), "api_keys_file": None, "metrics_port": None, "resume_jobs": False}
"""A server for one command listens on loopback only, needs no key, and leaves queued jobs alone."""

HINT = ". Commands take the key from ROPEWAY_API_KEY, in the environment or .env"
"""After a refusal of a key, whose message has the header instead."""


@contextmanager
def connected(
    server: str | None, model: str | None = None, check: Callable[[], None] | None = None
) -> Iterator[Ropeway]:
    """A client of ``server``; without one, of a temporary server in this process, which loads ``model``.

    ``check`` needs the libraries of such a server, and refuses the command before its model is loaded. Failures that a
    user can cause end the command with a message and exit code 1.
    """
    from service.cli.server import StartFailed, load_libraries, local_server, settings_with
    from service.client import RopewayError

    try:
        with ExitStack() as stack:
            url = server
            if url is None:
                settings = settings_with(model=model).model_copy(update=FOR_ONE_COMMAND)
                with loading(settings.model, here=True):
                    load_libraries()
                    if check is not None:
                        check()
                    url = stack.enter_context(local_server(settings))
                stack.callback(interrupts.be_quiet)  # while the server stops
            yield stack.enter_context(client_of(url, trust_env=server is not None))
    except (RopewayError, StartFailed) as error:
        if isinstance(error.__cause__, UnicodeEncodeError):
            # Python has lone surrogates for the bytes of an argument that is not UTF-8.
            fail(f"{error}: it must be UTF-8 text: convert it, as with iconv")
        fail(f"{error}{HINT if getattr(error, 'status', None) == 401 else ''}")


def client_of(url: str, *, trust_env: bool = False) -> Ropeway:
    """A client without a timeout; loopback ignores proxies."""
    from service.client import Ropeway

    return Ropeway(url, timeout=None, trust_env=trust_env)
