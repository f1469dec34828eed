"""Memory over time: phases, what is read of whom, how readings are thinned, and that peaks stay."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from optkit.devices import memory_watch
from optkit.devices.memory_watch import MOST, MemoryTrace, MemoryWatch, PhasedProgress, thinned
from tests.support.remembered import Lines

BLOCK = 96 * 2**20
SLEEPER = "import sys; block = bytearray(96 * 2**20); print(len(block), flush=True); sys.stdin.read()"


def trace(count: int, name: str = "gptq", peak_at: int = 0) -> MemoryTrace:
    resident = tuple(1000 + (at == peak_at) * 5000 for at in range(count))
    return MemoryTrace(name=name, seconds=tuple(float(at) for at in range(count)), resident_bytes=resident)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that other tests keep are not there."""
    children = psutil.Process.children
    kept = {each.pid for each in psutil.Process().children(recursive=True)}

    def others(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [each for each in children(self, recursive=recursive) if each.pid not in kept]

    monkeypatch.setattr(psutil.Process, "children", others)


def test_phases_are_read_at_their_ends_and_in_order() -> None:
    with MemoryWatch("open") as watch:
        watch.begin("decode")
        block = bytearray(BLOCK)
        block[::4096] = b"1" * len(block[::4096])
    first, second = watch.traces
    assert (first.name, second.name) == ("open", "decode")
    assert len(first.seconds) >= 2
    assert list(first.seconds) == sorted(first.seconds)
    assert max(second.resident_bytes) - min(first.resident_bytes) > 0.9 * BLOCK
    assert first.allocated_bytes == ()


@pytest.mark.usefixtures("alone")
def test_only_the_process_that_is_timed_is_read_without_own() -> None:
    with MemoryWatch("open", own=False) as watch:
        watch.begin("throughput")
        with subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()
            watch.begin("decode")
            child.kill()
    assert [each.name for each in watch.traces] == ["throughput", "decode"], "before that nothing ran"
    here = memory_watch.MemoryWatch("this")
    with here:
        pass
    assert BLOCK < max(watch.traces[0].resident_bytes) < BLOCK + here.traces[0].resident_bytes[0]


@pytest.mark.usefixtures("alone")
def test_what_torch_allocated_on_a_gpu_is_read_once_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: False, memory_allocated=lambda device: {"cuda:1": 7}[device])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with MemoryWatch("gptq", "cuda:1") as watch:
        cuda.is_initialized = lambda: True
    (found,) = watch.traces
    assert found.allocated_bytes[0] == 0
    assert found.allocated_bytes[-1] == 7
    with MemoryWatch("throughput", "cuda:1", own=False) as apart:
        pass
    assert apart.traces == ()


def test_the_longer_a_phase_the_less_often_it_is_read() -> None:
    phase = memory_watch._Phase("gptq", 0.0)
    for at in range(10_000):
        phase.add(1 + (at == 4321) * 999, at)
    assert len(phase.readings) < 2 * MOST
    assert phase.period_s > 64 * memory_watch.PERIOD_S
    assert max(phase.resident) == 1000
    assert phase.readings[-1][2] == 9999


def test_thinning_keeps_peaks_ends_and_short_traces() -> None:
    long, short = thinned([trace(200, peak_at=101), trace(3, "open")], 60)
    assert len(long.seconds) <= 30
    assert max(long.resident_bytes) == 6000
    assert (long.seconds[0], long.seconds[-1]) == (0.0, 199.0)
    assert short == trace(3, "open")
    many = thinned([trace(40) for _ in range(30)], 300)
    assert sum(len(each.seconds) for each in many) <= 300
    assert thinned([], 300) == ()


def test_bars_are_phases_and_turns_have_no_number() -> None:
    heard = Lines()
    with MemoryWatch("open") as watch:
        progress = PhasedProgress(heard, watch)
        with progress.task("open", 3, "layers"):
            pass
        with progress.task("throughput, turn 1 of 4", 2, "runs"):
            with progress.task("warming up, batch 1", 0) as task:
                task.advance(1, "note")
            progress.say("said")
            progress.warn("warned")
    assert [each.name for each in watch.traces] == ["open", "throughput", "warming up, batch 1", "throughput"]
    begun = [
        "open of 3 layers",
        "end",
        "throughput, turn 1 of 4 of 2 runs",
        "warming up, batch 1 of 0",
        "+1 note",
        "end",
    ]
    assert heard.lines == [*begun, "said", "warning: warned", "end"]


def test_a_process_that_ends_meanwhile_counts_nothing() -> None:
    with MemoryWatch("gptq") as watch, subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        watch._children = psutil.Process().children()
        child.wait()
    assert watch.traces[0].resident_bytes[-1] > 0
