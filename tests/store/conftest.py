"""A real S3 server, and machines that share what lies there."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

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
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store in a bucket of its own; the environment leads there."""
    s3 = pytest.importorskip("s3fs").S3FileSystem
    monkeypatch.setattr(s3, "retries", 1)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    name = "b" + hashlib.sha256(request.node.name.encode()).hexdigest()[:20]
    s3(use_listings_cache=False).mkdir(name)
    yield f"s3://{name}/team"
    if not environment(server).items() <= os.environ.items():
        s3.clear_instance_cache()


def lead_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is opened from now on talk to another address."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens the store of a machine, by name."""

    def opened(name: str, url: str) -> SharedStore:
        monkeypatch.setenv("OPTKIT_STORE_REMOTE", url)
        store = open_store(tmp_path / name, Warnings())
        assert isinstance(store, SharedStore)
        return store

    return opened
