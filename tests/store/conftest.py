"""A real S3 server, and machines that share what lies there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from optkit.store.shared import SharedStore, open_store
from tests.conftest import Warnings
from tests.support.object_store import environment, object_store

Opened = Callable[..., SharedStore]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with object_store() as address:
        yield address


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL of a store in a bucket of its own; the environment leads there."""
    from s3fs import S3FileSystem

    monkeypatch.setattr(S3FileSystem, "retries", 1)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    name = "b" + hashlib.sha256(request.node.name.encode()).hexdigest()[:20]
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/team"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens the store of a machine, by name."""

    def opened(name: str, url: str) -> SharedStore:
        monkeypatch.setenv("OPTKIT_STORE_REMOTE", url)
        store = open_store(tmp_path / name, Warnings())
        assert isinstance(store, SharedStore)
        return store

    return opened
