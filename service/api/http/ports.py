"""A trial of the listening address, before any model is loaded."""

from __future__ import annotations

import errno
import socket


class PortUnusable(OSError):
    """Nothing can listen there; the message names the setting at fault and says why."""

    def __init__(self, setting: str, host: str, port: int, error: OSError) -> None:
        place = f"{setting}: cannot listen on {host} port {port}"
        # No port would do.
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            place = f"ROPEWAY_HOST: cannot listen on {host}"
        super().__init__(f"{place}: {error.strerror or error}")


def require_free(setting: str, host: str, port: int) -> None:
    """Listen on every address of ``host`` and stop again; port 0 is always free.

    Raises:
        PortUnusable: when another process listens there, it is not allowed, or the host is none of this machine.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(address)
    except UnicodeError:  # a part of the name is empty, or longer than 63 characters
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        raise PortUnusable(setting, host, port, unknown) from None
    except OSError as error:
        raise PortUnusable(setting, host, port, error) from error
