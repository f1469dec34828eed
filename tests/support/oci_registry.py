"""Debian's docker-registry on this machine, with or without passwords, that can be killed."""

import base64
import datetime
import json
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.http_server import Quiet, served

USER, PASSWORD = "me", "open-sesame"
HTPASSWD = f"{USER}:$2y$04$abcdefghijklmnopqrstuuXcjcm5avyCiJoD2uS24xa2lb6fjMB3G\n"
"""By `htpasswd -nbB`, with the fewest rounds."""
SERVICE, ISSUER = "registry", "issuer"


def find_registry() -> str | None:
    """Return the program, or None."""
    return shutil.which("docker-registry")


class Registry:
    """A process of the registry; what it stores and logs outlives it."""

    def __init__(self, home: Path, auth: dict[str, Any] | None = None) -> None:
        self.home = home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        self.settings = home / "registry.json"
        storage = {"filesystem": {"rootdirectory": str(home / "storage")}}
        said = {"version": 0.1, "log": {"level": "error"}, "storage": storage, "http": {"addr": self.host}}
        self.settings.write_text(json.dumps({**said, **({"auth": auth} if auth else {})}), encoding="utf-8")
        self.log = home / "log"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            words = [find_registry() or "", "serve", str(self.settings)]
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        host, _, port = self.host.partition(":")
        for _ in range(1000):
            try:
                socket.create_connection((host, int(port))).close()
                return
            except OSError:
                time.sleep(0.01)
        raise AssertionError(self.log.read_text(encoding="utf-8"))

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def get(self, path: str, accept: str = "*/*") -> bytes:
        """Return what lies below /v2/."""
        wanted = urllib.request.Request(f"http://{self.host}/v2/{path}", headers={"accept": accept})
        with urllib.request.urlopen(wanted) as answer:
            return bytes(answer.read())

    def uploads(self) -> int:
        """Return how many blobs were sent, by its own log."""
        return sum('"PUT /v2/' in line and "/blobs/uploads/" in line for line in self.log.read_text().splitlines())


@contextmanager
def serving(home: Path, auth: dict[str, Any] | None = None) -> Iterator[Registry]:
    """Give a registry that answers until the block ends."""
    registry = Registry(home, auth)
    try:
        yield registry
    finally:
        registry.kill()


def by_password(home: Path) -> dict[str, Any]:
    """Return settings that let USER in."""
    (home / "htpasswd").write_text(HTPASSWD, encoding="utf-8")
    return {"htpasswd": {"realm": "here", "path": str(home / "htpasswd")}}


@contextmanager
def by_token(home: Path) -> Iterator[dict[str, Any]]:
    """Give settings that let in who has a token, while a server gives USER tokens for repositories
    below `me/`. https://distribution.github.io/distribution/spec/auth/jwt
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, ISSUER)])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    draft = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    certificate = draft.sign(key, hashes.SHA256())
    (home / "root.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    chain = [base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()]

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    def token(scope: str) -> str:
        kind, repository, actions = scope.split(":")
        allowed = actions.split(",") if repository.startswith(f"{USER}/") else ["pull"]
        seconds = int(now.timestamp())
        claims = {
            "iss": ISSUER,
            "sub": USER,
            "aud": SERVICE,
            "nbf": seconds - 60,
            "exp": seconds + 600,
            "jti": str(uuid.uuid4()),
            "access": [{"type": kind, "name": repository, "actions": allowed}],
        }
        head = {"typ": "JWT", "alg": "RS256", "x5c": chain}
        signed = f"{part(json.dumps(head).encode())}.{part(json.dumps(claims).encode())}"
        return f"{signed}.{part(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    class Handler(Quiet):
        def do_GET(self) -> None:  # noqa: N802
            known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            let_in = self.headers.get("authorization") == f"Basic {known}"
            query = parse_qs(urlsplit(self.path).query)
            said = {"token": token(query["scope"][0])} if let_in else {"errors": [{"code": "DENIED", "message": "no"}]}
            content = json.dumps(said).encode()
            self.send_response(200 if let_in else 401)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with served(Handler) as host:
        who = {"realm": f"http://{host}/token", "service": SERVICE, "issuer": ISSUER}
        yield {"token": {**who, "rootcertbundle": str(home / "root.pem")}}
