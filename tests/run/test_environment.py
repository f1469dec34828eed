import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from optkit import environment
from tests.support.fresh_python import imported_by


def test_describing_the_cpu_and_choosing_a_device_import_no_torch():
    code = (
        "from optkit.environment import *\nbest_device(); memory(); described = describe_environment('cpu')\n"
        "assert described['torch'] and described['device'] == 'cpu' and described['cpu_cores'] >= 1, described\n"
        "assert described['cpu_threads'] == cpu_threads()"
    )
    assert "torch" not in imported_by(code)


def test_the_modules_of_evals_and_scorecards_import_no_torch():
    code = (
        "import optkit.scorecard, optkit.recipe.gates, optkit.common.statistics\n"
        "import optkit_evals.perplexity, optkit_evals.divergence, optkit_evals.throughput, optkit_evals.footprint"
    )
    assert not {"torch", "transformers", "numpy"} & imported_by(code)


def test_threads_are_described_once_torch_is_there():
    import torch

    described = environment.describe_environment("cpu")
    assert described["cpu_threads"] == torch.get_num_threads()
    assert described["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert described["optkit"]


def test_best_device_agrees_with_torch():
    import torch

    assert environment.best_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert environment.torch_has_cuda() == (torch.version.cuda is not None)


def test_a_gpu_is_only_chosen_by_a_torch_that_can_use_it(monkeypatch):
    monkeypatch.setattr(environment, "visible_gpus", lambda: 1)
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: False)
    assert environment.best_device() == "cpu"
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: True)
    assert environment.best_device() == "cuda"


def made_driver(ready: int = 0) -> SimpleNamespace:
    """NVIDIA's driver with two GPUs; it answers 0 if it could do what it was asked."""

    def answers(find):
        def answer(pointer, *asked):
            pointer._obj.value = find(*asked)
            return 0

        return answer

    return SimpleNamespace(
        cuInit=lambda flags: ready,
        cuDeviceGetCount=answers(lambda: 2),
        cuDeviceGet=lambda pointer, index: answers(lambda: 10 + index)(pointer) if index < 2 else 101,
        cuDeviceGetAttribute=answers(lambda attribute, number: {75: 9, 76: number.value - 10}[attribute]),
        cuDeviceTotalMem_v2=answers(lambda number: number.value << 33),
    )


def test_the_driver_is_asked_about_gpus(monkeypatch):
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: made_driver())
    assert environment.visible_gpus() == 2
    assert [environment.compute_capability(device) for device in ("cpu", "cuda", "cuda:1", "cuda:2")] == [
        None,
        (9, 0),
        (9, 1),
        None,
    ]
    assert [environment.gpu_memory_bytes(device) for device in ("cpu", "cuda", "cuda:1", "cuda:2")] == [
        None,
        10 << 33,
        11 << 33,
        None,
    ]


@pytest.mark.parametrize(
    ("variable", "said", "expected"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,per_process_memory_fraction: .25", 10 << 31),
        ("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.5", 10 << 32),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", 10 << 33),
    ],
)
def test_a_limit_of_torch_is_all_that_it_has_of_a_gpu(monkeypatch, variable, said, expected):
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: made_driver())
    monkeypatch.setenv(variable, said)
    assert environment.gpu_memory_bytes("cuda") == expected


@pytest.mark.parametrize("found", [lambda name: made_driver(ready=100), None])
def test_without_a_driver_that_works_there_are_no_gpus(monkeypatch, found):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(environment.ctypes, "CDLL", found or missing)
    assert environment.visible_gpus() == 0
    assert environment.compute_capability("cuda") is None
    assert environment.gpu_memory_bytes("cuda") is None


def test_package_version():
    assert environment.package_version("pydantic")
    assert environment.package_version("no-such-package") is None


def test_cpu_name(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\nmodel name\t: B\n")
    assert environment.cpu_name(cpuinfo) == "A Fast One @ 3 GHz"
    assert environment.cpu_name(tmp_path / "none")
    numbers = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: {}\n"
    cpuinfo.write_text(numbers.format("AMD EPYC"))
    assert environment.cpu_name(cpuinfo) == "AMD EPYC family 26 model 2"
    cpuinfo.write_text(numbers.format("AMD EPYC 9654"))
    assert environment.cpu_name(cpuinfo) == "AMD EPYC 9654"


def test_cpu_flags_are_read_on_both_architectures(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 avx512f\nflags\t\t: b\n")
    assert environment.cpu_flags(cpuinfo) == {"fpu", "avx512_bf16", "avx512f"}
    cpuinfo.write_text("Features\t: fp asimd i8mm\n")
    assert environment.cpu_flags(cpuinfo) == {"fp", "asimd", "i8mm"}
    assert environment.cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(("limit", "total"), [("max", None), ("1000000", 1_000_000)])
def test_memory_keeps_to_the_containers_limit(tmp_path, monkeypatch, limit, total):
    import psutil

    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    found = environment.memory()
    assert found.total_bytes == (total or psutil.virtual_memory().total)
    assert found.available_bytes == 600_000 if total else found.available_bytes > 1_000_000


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Aug 5 2025",
    ],
)
def test_the_driver_is_read_from_the_kernel_module(tmp_path, line):
    (tmp_path / "version").write_text(line + "\nGCC version: gcc version 12.3.0\n")
    assert environment.driver_version(tmp_path / "version") == "580.159.04"


@pytest.mark.parametrize(
    ("ours", "device", "theirs"),
    [
        ("4,7", "cuda:1", "7"),
        ("4,7", "cuda", "4"),
        ("GPU-1a", "cuda:0", "GPU-1a"),
        ("", "cuda:2", "2"),
        ("4,7", "cpu", ""),
    ],
)
def test_another_process_sees_one_device(monkeypatch: pytest.MonkeyPatch, ours: str, device: str, theirs: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    assert environment.offline_on(device)["CUDA_VISIBLE_DEVICES"] == theirs


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMP_NUM_THREADS": "1,2"},
        pytest.param({"OMP_NUM_THREADS": "1"}, marks=pytest.mark.slow),
        pytest.param({"OMP_NUM_THREADS": "64"}, marks=pytest.mark.slow),
        pytest.param({"MKL_NUM_THREADS": "1"}, marks=pytest.mark.slow),
    ],
)
def test_threads_are_known_before_torch_is_imported(variables):
    code = (
        "from optkit.environment import cpu_threads; before = cpu_threads(); import torch; print(before, "
        "torch.get_num_threads())"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True, check=True
    )
    before, after = done.stdout.split()
    assert before == after
