"""A trial of the listening address, before any model is loaded."""

from __future__ import annotations

import socket


class PortUnusable(OSError):
    """Nothing can listen there; the message names the setting and says why."""

    def __init__(self, setting: str, host: str, port: int, error: OSError) -> None:
        super().__init__(f"{setting}: cannot listen on {host} port {port}: {error.strerror or error}")


def require_free(setting: str, host: str, port: int) -> None:
    """Listen on every address of ``host`` and stop again; port 0 is always free.

    Raises:
        PortUnusable: when another process listens there, the address is not of this machine, or it is not allowed.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(address)
    except OSError as error:
        raise PortUnusable(setting, host, port, error) from error
