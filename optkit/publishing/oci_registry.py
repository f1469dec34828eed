"""A registry of OCI's distribution specification, by HTTP: blobs, manifests, and who may write.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md, and for tokens
https://distribution.github.io/distribution/spec/auth/token. oras 0.2 reads a whole blob into memory
unless it sends it in pieces, which not every registry takes, and has to be told how to log in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from optkit import __version__
from optkit.common.files import object_if_any
from optkit.errors import PushError

DOCKER_HUB = "docker.io"
OTHER_NAMES = {DOCKER_HUB: ("registry-1.docker.io", "https://index.docker.io/v1/")}
"""Registry -> the host that answers, and what Docker's settings call it."""
LOCAL = re.compile(r"(?:localhost|127\.[\d.]+)(?::\d+)?")
PATIENCE = httpx.Timeout(300, connect=30)
"""Seconds; a registry reads a large blob again before it answers."""
USERNAME, PASSWORD = "OPTKIT_OCI_USERNAME", "OPTKIT_OCI_PASSWORD"
HELPER = "docker-credential-"
Login = tuple[str, str]
"""User and password."""


def address_of(host: str) -> str:
    """Return where a registry answers: by HTTPS, unless it is on this machine."""
    return f"{'http' if LOCAL.fullmatch(host) else 'https'}://{OTHER_NAMES.get(host, (host,))[0]}"


def login_of(host: str) -> Login | None:
    """Return user and password, of the environment or as `docker login` left them; None without.
    Raises PushError if Docker's settings name a helper that is not installed.
    """
    if password := os.environ.get(PASSWORD):
        return os.environ.get(USERNAME, ""), password
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json")
    settings = object_if_any(path)
    name = OTHER_NAMES.get(host, ("", host))[1]
    with suppress(ValueError, KeyError, AttributeError, TypeError):  # settings that Docker did not write
        if helper := settings.get("credHelpers", {}).get(name) or settings.get("credsStore"):
            return _ask_helper(f"{HELPER}{helper}", name, path)
        user, _, password = b64decode(settings["auths"][name]["auth"]).decode().partition(":")
        return user, password
    return None


def _ask_helper(program: str, name: str, path: Path) -> Login | None:
    try:
        said = subprocess.run([program, "get"], input=name.encode(), capture_output=True, check=True).stdout
    except OSError as error:
        remedy = f"Install it, or set {USERNAME} and {PASSWORD}"
        raise PushError(f"it names {program}, which cannot be run", where=str(path), remedy=remedy) from error
    except subprocess.CalledProcessError:  # it knows nobody there
        return None
    found = json.loads(said)
    return found["Username"], found["Secret"]


class Access(httpx.Auth):
    """Answers a registry that asks who is there, by password or by a token for one repository."""

    requires_response_body = True

    def __init__(self, host: str, repository: str, login: Login | None) -> None:
        self.host, self.scope = host, f"repository:{repository}:pull,push"
        self.basic = f"Basic {b64encode(':'.join(login).encode()).decode()}" if login else ""
        self.header = ""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request, and again if the registry asks; other hosts learn nothing."""
        if request.url.netloc.decode() != self.host:
            yield request
            return
        if self.header:
            request.headers["authorization"] = self.header
        answer = yield request
        if answer.status_code != httpx.codes.UNAUTHORIZED or request.method == "PUT":
            return  # the body of a PUT is a stream, and a HEAD or POST went before it
        kind, _, said = answer.headers.get("www-authenticate", "").partition(" ")
        if kind.lower() == "bearer":
            parts = dict(re.findall(r'(\w+)="([^"]*)"', said))
            query = {"service": parts.get("service", ""), "scope": self.scope}
            headers = {"authorization": self.basic} if self.basic else {}
            given = yield httpx.Request("GET", parts.get("realm", ""), params=query, headers=headers)
            if given.is_error:
                return
            self.header = f"Bearer {given.json().get('token') or given.json().get('access_token')}"
        elif self.basic and self.header != self.basic:
            self.header = self.basic
        else:
            return
        request.headers["authorization"] = self.header
        yield request


class Registry:
    """One repository of a registry. Each method raises httpx.HTTPError if it is refused or the way
    there breaks.
    """

    def __init__(self, host: str, repository: str, login: Login | None) -> None:
        address = httpx.URL(f"{address_of(host)}/v2/{repository}/")
        access = Access(address.netloc.decode(), repository, login)
        headers = {"user-agent": f"optkit/{__version__}"}
        self.client = httpx.Client(base_url=address, auth=access, timeout=PATIENCE, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def has(self, digest: str) -> bool:
        """Say whether a blob is there; one that is elsewhere by a redirection is."""
        answer = self.client.head(f"blobs/{digest}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return False
        return answer.has_redirect_location or bool(answer.raise_for_status())

    def send(self, digest: str, blocks: Iterable[bytes], size_bytes: int) -> None:
        """Upload a blob in one request."""
        begun = self.client.post("blobs/uploads/").raise_for_status()
        place = begun.url.join(begun.headers.get("location", "")).copy_add_param("digest", digest)
        headers = {"content-length": str(size_bytes), "content-type": "application/octet-stream"}
        self.client.put(place, content=iter(blocks), headers=headers).raise_for_status()

    def tag(self, tag: str, manifest: bytes, media_type: str) -> None:
        """Upload a manifest whose blobs are there."""
        headers = {"content-type": media_type}
        self.client.put(f"manifests/{tag}", content=manifest, headers=headers).raise_for_status()


def said_by(answer: httpx.Response) -> str:
    """Return what a registry says of its refusal, in one line."""
    try:
        known: Any = answer.json()["errors"]
        return "; ".join(f"{each['code']}: {each.get('message', '')}" for each in known)
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.text.split())[:200] or answer.reason_phrase
