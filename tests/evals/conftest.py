"""A session without a model, and its clock."""

import pytest
from optkit_evals import timing

from optkit.devices.cpu_watch import CpuWatch
from tests.support.bigram_session import BigramSession
from tests.support.clock import Clock


@pytest.fixture
def session() -> BigramSession:
    return BigramSession()


@pytest.fixture
def clock(session, monkeypatch) -> Clock:
    clock = Clock(session)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(CpuWatch, "others", lambda self, before: 0.0)
    return clock
