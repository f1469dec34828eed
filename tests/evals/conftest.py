"""A session without a model, and its clock."""

import pytest
from optkit_evals import timing

from optkit.devices.cpu_watch import CpuWatch
from tests.support.bigram_session import BigramSession
from tests.support.clock import Clock


@pytest.fixture
def session() -> BigramSession:
    return BigramSession()


@pytest.fixture(scope="module")
def text(request, tmp_path_factory) -> str:
    """Return a file of the letters that a module of tests has."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(request.module.LETTERS)
    return str(path)


@pytest.fixture
def clock(session, monkeypatch) -> Clock:
    clock = Clock(session)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(CpuWatch, "others", lambda self, before: 0.0)
    return clock
