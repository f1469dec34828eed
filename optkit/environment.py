"""What the numbers were measured on: versions, device, driver, memory, cores.

Torch is imported only to describe a GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from optkit import __version__
from optkit.errors import UsageError

PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy")
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
"""Numbers of CUdevice_attribute."""
_CGROUP = Path("/sys/fs/cgroup")
COMPILERS = {"C++": ("CXX", ("g++", "clang++")), "C": ("CC", ("gcc", "clang", "cc"))}
"""Language -> environment variable and usual names of its compiler."""
ARCHITECTURE = "OPTKIT_CPU_ARCH"
"""Names what the `-march` of CPU kernels is instead of `native`, e.g. x86-64-v3 for AVX2 alone."""
EXACT = "OPTKIT_CPU_EXACT"
"""Set to 1 it keeps all activations of CPU kernels in float32."""


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of a device."""

    total_bytes: int
    available_bytes: int


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def unmet(requires: Iterable[str]) -> list[str]:
    """Return which of the requirements, e.g. `bitsandbytes>=0.50`, are not installed.
    A version that will not do counts as not installed.

    Of `onnxruntime>=1.22 | onnxruntime-gpu>=1.22`, distributions of one package, any will do; the
    first is returned if none is there.
    """
    choices = [text.split(" | ") for text in requires]
    return [each[0] for each in choices if not any(_is_met(text) for text in each)]


def _is_met(requirement: str) -> bool:
    from packaging.requirements import Requirement

    need = Requirement(requirement)
    version = package_version(need.name)
    return version is not None and need.specifier.contains(version, prereleases=True)


def best_device() -> str:
    """Return `cuda` if torch was built for it and the driver shows this process a GPU, else `cpu`.
    It imports no torch.
    """
    return "cuda" if torch_has_cuda() and visible_gpus() else "cpu"


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, from its version file.
    False if torch is not installed.
    """
    try:
        version = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    except metadata.PackageNotFoundError:
        return False
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return re.search(r"^cuda(?::[^=]+)?\s*=\s*['\"]", text, re.MULTILINE) is not None


def usable_device(device: str | None) -> str:
    """Return the device, the best one if None. Raises UsageError for a GPU that torch does not see."""
    if device is None or device == "cpu":
        return device or best_device()
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) < count:
        return device
    why = "" if torch_has_cuda() else "The installed torch was built without CUDA"
    known = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
    raise UsageError(f"torch sees {count} GPUs here", where=f"device {device}", why=why, remedy=f"Use {known}")


def planned_device(device: str | None) -> str:
    """Return the device that a plan is for, the best one here if None. It may be a GPU that another
    machine has. Raises UsageError as `usable_device` if there are others here.
    """
    return device if device and not visible_gpus() else usable_device(device)


def visible_gpus() -> int:
    """Return how many GPUs NVIDIA's driver shows to this process; 0 without a driver."""
    driver, count = _driver(), ctypes.c_int()
    return count.value if driver and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def compute_capability(device: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, e.g. `(9, 0)`, from NVIDIA's driver, without torch.
    None for a CPU or without a driver.
    """
    if (found := _driver_of(device)) is None:
        return None
    driver, number = found
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, number)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_CAPABILITY_MINOR, number)
    return major.value, minor.value


def gpu_memory_bytes(device: str) -> int | None:
    """Return what torch may take of a GPU's memory, from NVIDIA's driver and torch's variable, without torch.
    None for a CPU or without a driver.
    """
    if (found := _driver_of(device)) is None:
        return None
    (driver, number), size = found, ctypes.c_size_t()
    if driver.cuDeviceTotalMem_v2(ctypes.byref(size), number):
        return None
    asked = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
    limit = re.search(r"per_process_memory_fraction:\s*(\d*\.?\d+)", asked)
    return int(size.value * float(limit[1])) if limit else size.value


def offline_on(device: str) -> dict[str, str]:
    """Return the variables with which another process uses no network and sees this device alone:
    no GPU for `cpu`, and for `cuda:1` the second that we see.
    """
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    index = int(device.partition(":")[2] or 0)
    visible = "" if device == "cpu" else seen[index] if index < len(seen) else str(index)
    return {"CUDA_VISIBLE_DEVICES": visible, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model name, e.g. `AMD EPYC 9654 96-Core Processor`.
    Behind a name without a number stand Linux's: virtual machines call each `AMD EPYC`.
    """
    name, family, model = (_cpu_field(cpuinfo, field) for field in ("model name", "cpu family", "model"))
    if name and family and not re.search(r"\d", name):
        return f"{name} family {family} model {model}"
    return name or platform.processor() or platform.machine()


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what Linux lists of the CPU's instructions, e.g. `avx512_bf16`; nothing elsewhere."""
    return frozenset(_cpu_field(cpuinfo, "(?:flags|Features)").split())


def _cpu_field(cpuinfo: Path, field: str) -> str:
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    found = re.search(rf"^{field}\s*:(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


@cache
def cpu_has(flag: str) -> bool:
    """Say whether it is one of `cpu_flags`."""
    return flag in cpu_flags()


def find_compiler(language: str) -> str | None:
    """Return the compiler that torch.compile and our own kernels call, of a language of `COMPILERS`."""
    return next((found for name in compiler_names(language) if (found := shutil.which(name))), None)


def compiler_names(language: str) -> tuple[str, ...]:
    """Return the names by which it is looked for: that of its environment variable alone, if there is one."""
    variable, names = COMPILERS[language]
    named = os.environ.get(variable)
    return (named,) if named else names


def device_name(device: str) -> str:
    """Return the name of a device, e.g. `NVIDIA H200`.
    torch is imported only if nvidia-smi cannot tell a GPU's; one that is not here has none.
    """
    if device == "cpu":
        return cpu_name()
    names = set(_nvidia_smi("name"))
    if len(names) == 1:
        return names.pop()
    import torch

    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "a GPU elsewhere"


def cpu_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_threads() -> int:
    """Return how many threads torch computes with on the CPU, or will if it is not imported yet:
    as many as asked for or as there are physical cores, whichever is less."""
    if loaded := sys.modules.get("torch"):
        return int(loaded.get_num_threads())
    # torch takes over what Intel's MKL decides; its own variable goes before that of OpenMP.
    asked = (os.environ.get(name, "").split(",")[0] for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    cores = _physical_cores()
    return min(next((int(number) for number in asked if number.isdecimal() and int(number)), cores), cores)


def cpu_kernels() -> str:
    """Return what the user changed of optkit's CPU kernels, e.g. `OPTKIT_CPU_EXACT=1`; empty if nothing."""
    exact, architecture = f"{EXACT}=1" if asks_exact() else "", cpu_architecture()
    return " ".join(filter(None, [f"{ARCHITECTURE}={architecture}" if architecture != "native" else "", exact]))


def cpu_architecture() -> str:
    """Return what CPU kernels are compiled for, as a compiler's `-march`."""
    return os.environ.get(ARCHITECTURE) or "native"


def asks_exact() -> bool:
    """Say whether the user asks for activations in float32. Raises UsageError for what is neither 1 nor 0."""
    value = os.environ.get(EXACT) or "0"
    if value not in ("0", "1"):
        raise UsageError(f"'{value}' is neither 1 nor 0", where=EXACT, remedy=f"Set {EXACT}=1, or unset it")
    return value == "1"


def _physical_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many physical cores this process may run on; each is one if the kernel does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return cpu_cores()
    places = [cpus / f"cpu{index}" / "topology" for index in os.sched_getaffinity(0)]
    try:
        return len(
            {tuple((place / name).read_text() for name in ("physical_package_id", "core_id")) for place in places}
        )
    except OSError:
        return cpu_cores()


def memory(device: str = "cpu") -> Memory:
    """Return the memory of a device.
    Main memory is what the container's limit (cgroup v2) leaves of it; of a GPU what torch's limit leaves is available.
    """
    if device != "cpu":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        most = int(torch.cuda.get_per_process_memory_fraction(torch.device(device).index) * total)
        left = max(0, most - torch.cuda.memory_reserved(device))
        return Memory(total_bytes=int(total), available_bytes=min(int(free), left))
    import psutil

    main = psutil.virtual_memory()
    limit = _cgroup_number("memory.max")
    if limit is None or limit >= main.total:
        return Memory(total_bytes=int(main.total), available_bytes=int(main.available))
    used = _cgroup_number("memory.current") or 0
    return Memory(total_bytes=limit, available_bytes=max(0, min(int(main.available), limit - used)))


def describe_environment(device: str) -> dict[str, Any]:
    """Return what a scorecard records about the machine, as JSON values.
    A version that is not installed is left out.
    """
    described: dict[str, Any] = {
        "optkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "device_name": cpu_name(),
        "cpu": cpu_name(),
        "cpu_cores": cpu_cores(),
        "cpu_threads": cpu_threads(),
        "memory_bytes": memory().total_bytes,
    }
    described |= {name: version for name in PACKAGES if (version := package_version(name))}
    if changed := cpu_kernels():
        described["cpu_kernels"] = changed
    if device != "cpu":
        import torch

        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        }
    return described


def driver_version(module: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel driver, None if there is none."""
    if module.is_file():
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", module.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[1]
    return next(iter(_nvidia_smi("driver_version")), None)


def _driver() -> Any:
    """Return NVIDIA's driver, ready to be asked; None if there is none that works."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def _driver_of(device: str) -> tuple[Any, ctypes.c_int] | None:
    """Return NVIDIA's driver and its number of a GPU.
    None for a CPU, without a driver, or if it has no such GPU.
    """
    driver = None if device == "cpu" else _driver()
    number = ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(number), int(device.partition(":")[2] or 0)):
        return None
    return driver, number


def _nvidia_smi(question: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={question}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def _cgroup_number(name: str) -> int | None:
    path = _CGROUP / name
    text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
