"""A proxy before a server, below a path prefix; the server behind it may be another one later."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

GONE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Proxy(ThreadingTCPServer):
    """Passes requests for ``url`` on to ``target``, one per connection, without the prefix."""

    daemon_threads = True

    def __init__(self, target: str, prefix: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.prefix = target, prefix

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"


class Handler(StreamRequestHandler):
    server: Proxy

    def handle(self) -> None:
        line = self.rfile.readline()
        prefix = f" {self.server.prefix}/".encode()
        if prefix not in line:
            self.wfile.write(GONE)
            return
        lines = [line.replace(prefix, b" /", 1)]
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            if not line.lower().startswith(b"connection:"):
                lines.append(line)
        length = next((int(one[15:]) for one in lines if one.lower().startswith(b"content-length:")), 0)
        there = urlsplit(self.server.target)
        with suppress(OSError), socket.create_connection((there.hostname or "", there.port or 80)) as server:
            server.sendall(b"".join([*lines, b"Connection: close\r\n\r\n", self.rfile.read(length)]))
            while piece := server.recv(65536):
                self.wfile.write(piece)


@contextmanager
def proxied(target: str, prefix: str = "") -> Iterator[Proxy]:
    with Proxy(target, prefix) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
