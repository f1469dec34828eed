"""A real S3-compatible server, and a way to it that breaks when a test says so."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Self

SECRET = "a-secret-that-nobody-prints"


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """Start moto's server; give its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def environment(address: str, key: str = "somebody") -> dict[str, str]:
    """Return the variables by which AWS's own libraries find a server, with one attempt a request."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def refusing(address: str) -> Iterator[None]:
    """Have the server refuse keys that it does not know, which are all."""

    def allow(requests: str) -> None:
        plain = {"Content-Type": "text/plain"}
        place = urllib.request.Request(f"{address}/moto-api/reset-auth", requests.encode(), plain)
        urllib.request.urlopen(place).close()

    allow("0")
    try:
        yield
    finally:
        allow("inf")


class Way:
    """Leads to a server until so many bytes have passed; then it takes no more, or ends."""

    def __init__(self, address: str, bytes_until: int, *, ends: bool) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._target, self._left, self._ends = (host, int(port)), bytes_until, ends
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listener]
        self.address = "http://{}:{}".format(*self._listener.getsockname())
        self.broken = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._target)
                self._open += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self._left -= len(data)
                if self._left < 0:
                    self.broken.set()
                    if self._ends:
                        self.__exit__()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
