"""What NVML says of a GPU, with a library that answers as NVML's documentation says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optkit_evals import throughput, timing
from optkit_evals.throughput import Throughput

from optkit.devices import gpu_watch
from optkit.devices.gpu_watch import GpuWatch
from optkit.devices.nvml import Gpu, described, slowdowns
from optkit.measure import EvalContext, QueueingSession
from optkit.session import open_session
from tests.support.bigram_session import BigramSession, Said


class Library:
    """NVML of one GPU; a number for each question, None for one that it cannot answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"ClockInfo": 1980, "MaxClockInfo": 1980, "Temperature": 45, "PowerUsage": 412_000} | answers
        self.asked: list[bytes] = []

    def __getattr__(self, function: str) -> Any:
        question = function.removeprefix("nvmlDeviceGet")
        if question not in {"nvmlInit_v2", "HandleByUUID"} and self.answers.get(question) is None:
            raise AttributeError(function)

        def call(*arguments: Any) -> int:
            if question == "nvmlInit_v2":
                return 0
            if question == "HandleByUUID":
                self.asked.append(arguments[0])
                return int(self.answers.get("unknown", 0))
            place = arguments[1] if question == "ComputeRunningProcesses_v3" else arguments[-1]
            answer = self.answers[question]
            place._obj.value = answer() if callable(answer) else answer
            return 7 if question == "ComputeRunningProcesses_v3" and answer else 0

        return call


def counter(*values: int) -> Any:
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_a_reading() -> None:
    library = Library(CurrentClocksThrottleReasons=0x05, TotalEnergyConsumption=9_000_500)
    gpu = Gpu("12ab", library)
    assert library.asked == [b"GPU-12ab"]
    reading = gpu.read()
    assert (reading.sm_mhz, reading.memory_mhz, reading.temperature_c, reading.power_w) == (1980, 1980, 45, 412.0)
    assert reading.slowed_by == ("its power limit",)
    assert reading.energy_j == 9000.5
    assert gpu.processes() is None
    assert Gpu("GPU-12ab", library).largest_sm_mhz() == 1980
    assert library.asked[-1] == b"GPU-12ab"


def test_what_it_does_not_tell_is_none() -> None:
    silent = Gpu("1", Library(ClockInfo=None, Temperature=None, PowerUsage=None, MaxClockInfo=None))
    reading = silent.read()
    assert (reading.sm_mhz, reading.power_w, reading.energy_j, reading.slowed_by) == (None, None, None, ())
    assert described([reading], silent.largest_sm_mhz()) == ""


def test_a_gpu_that_nvml_does_not_know() -> None:
    with pytest.raises(OSError, match="NVML: nvmlDeviceGetHandleByUUID returned 6"):
        Gpu("1", Library(unknown=6))

    def find(device: str) -> Gpu | None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    watch = GpuWatch.of("cuda", find)
    assert list(watch.warnings()) == [
        "clocks, throttling and energy are not reported: libnvidia-ml.so.1: cannot open shared object file"
    ]
    assert watch.note() == ""
    assert watch.energy_j() is None


def test_readings_in_words() -> None:
    watch = GpuWatch(
        "cuda", Gpu("1", Library(Temperature=counter(41, 48), CurrentClocksThrottleReasons=counter(0x20, 0x24, 0)))
    )
    for _ in range(3):
        watch.read()
    assert watch.note() == "the GPU ran at 1,980 MHz (of 1,980), memory 1,980 MHz, 41 to 48 °C, up to 412 W"
    assert slowdowns(watch.readings) == ["heat (software)", "its power limit"]
    assert list(watch.warnings()) == [
        "the GPU was slowed down by heat (software) and its power limit at 2 of 3 repeats"
    ]


@pytest.mark.parametrize(
    ("processes", "foreign", "said"),
    [
        (1, 0, ""),
        (2, 0, "another process is on the GPU"),
        (4, 0, "3 other processes are on the GPU"),
        (0, 1 << 30, ""),
        (None, 5_000_000_000, "others hold 5.0 GB of the GPU's memory"),
        (1, 5_000_000_000, "others hold 5.0 GB of the GPU's memory"),
    ],
)
def test_others_on_the_gpu(processes: int | None, foreign: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "foreign_bytes", lambda device: foreign)
    assert GpuWatch("cuda", Gpu("1", Library(ComputeRunningProcesses_v3=processes))).others() == said


def test_a_cpu_has_nothing_to_read() -> None:
    watch = GpuWatch.of("cpu")
    watch.read()
    assert (watch.readings, watch.note(), watch.others(), watch.energy_j(), list(watch.warnings())) == (
        [],
        "",
        "",
        None,
        [],
    )


def test_throughput_reports_energy_clocks_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(
        TotalEnergyConsumption=counter(1000, 1000, 13_000),
        CurrentClocksThrottleReasons=0x4,
        ComputeRunningProcesses_v3=2,
    )
    monkeypatch.setattr(throughput.GpuWatch, "of", classmethod(lambda cls, device: GpuWatch(device, Gpu("1", library))))
    said = EvalContext(progress=Said())
    eval = Throughput(batch_sizes=(3,), prompts=(4,), new_tokens=2, repeats=2, limit_s=1e-9, warmup=3)
    found = {metric.name: metric for metric in eval.run(BigramSession(), said)}
    energy = found["energy_per_token_j"]
    assert (energy.value, energy.unit, energy.higher_is_better) == (12 / (3 * 2), "J", False)
    assert "throughput: another process is on the GPU, and the numbers are shared with it" in said.progress.warnings  # type: ignore[attr-defined]
    assert "throughput: the GPU was slowed down by its power limit at 1 of 1 repeats" in said.progress.warnings  # type: ignore[attr-defined]
    assert said.notes[-1].startswith("throughput: the GPU ran at 1,980 MHz")


def test_on_a_gpu_torch_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    session = BigramSession()
    session.device = "cuda"
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at = clock.now

        def elapsed_time(self, later: "Event") -> float:
            return (later.at - self.at) * 1000

    for name, stand_in in {
        "Event": Event,
        "current_stream": lambda device: None,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def tick(batch: int, index: int) -> None:
        clock.now += 0.5 if index == 0 else 0.125

    session.on_token = tick
    tokens = torch.ones(1, 4, dtype=torch.int64)
    assert not isinstance(session, QueueingSession)
    session.queue = session.stream  # type: ignore[attr-defined]
    assert timing.answer(session, tokens, 3) == timing.Timing(0.5, (0.125, 0.125))


def test_a_torch_session_can_run_ahead(tiny_model: Any) -> None:
    session = open_session(tiny_model("llama"))
    assert isinstance(session, QueueingSession)
    tokens = torch.arange(6)[None]
    assert torch.cat(list(session.queue(tokens, 5))).equal(torch.cat(list(session.stream(tokens, 5))))


@pytest.mark.gpu
def test_nvml_and_events_on_a_real_gpu(tiny_model: Any) -> None:
    watch = GpuWatch.of("cuda")
    watch.read()
    assert watch.readings[0].sm_mhz > 0
    assert watch.energy_j() > 0
    assert watch.gpu.processes() is None or watch.gpu.processes() >= 0
    session = open_session(tiny_model("llama"), device="cuda")
    tokens = timing.random_tokens(session, 2, 16, 0)
    timing.answer(session, tokens, 8)
    begin = timing.time.perf_counter()
    by_events = timing.answer(session, tokens, 64)
    around_s = timing.time.perf_counter() - begin
    assert around_s / 100 < by_events.total_s <= around_s  # in seconds, and within what the clock saw
    found = {metric.name for metric in Throughput(prompts=(8,), new_tokens=4, repeats=2).run(session, EvalContext())}
    assert found == set(Throughput.metrics)
