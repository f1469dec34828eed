"""The builds of ONNX Runtime and of its GenAI.
One package each has several names on PyPI, of which an environment can hold one.
"""

from __future__ import annotations

from collections.abc import Iterable

from optkit.environment import package_version
from optkit.model.formats.onnx import RUNTIME_BUILDS as RUNTIME_BUILDS

GENAI_BUILDS = ("onnxruntime-genai", "onnxruntime-genai-cuda", "onnxruntime-genai-directml")
EXTRAS = {"onnxruntime": "onnx", "onnxruntime-gpu": "onnx-gpu"}
"""Build -> the extra of optkit that installs it and the GenAI that fits."""
UNUSABLE = (ImportError, OSError, AttributeError)
"""What importing a build raises whose files another one overwrote, or removed."""
SUFFIX = "ExecutionProvider"


def installed(builds: Iterable[str]) -> dict[str, str]:
    """Return distribution -> version of those that are installed."""
    return {name: version for name in builds if (version := package_version(name))}


def providers() -> tuple[str, ...]:
    """Return what the installed onnxruntime can compute on, e.g. `("CUDA", "CPU")`. Raises
    `UNUSABLE`.
    """
    import onnxruntime

    return tuple(name.removesuffix(SUFFIX) for name in onnxruntime.get_available_providers())


def problems() -> list[str]:
    """Return what is wrong with the installed builds.
    Two may lie in each other's place, or one may not be importable.
    """
    found = [_conflict(here) for builds in (RUNTIME_BUILDS, GENAI_BUILDS) if len(here := installed(builds)) > 1]
    if not found and installed(RUNTIME_BUILDS):
        try:
            providers()
        except UNUSABLE as error:
            name = next(iter(installed(RUNTIME_BUILDS)))
            found.append(f"{name} cannot be imported: {error}. Run: pip install --force-reinstall {name}")
    return found


def _conflict(here: dict[str, str]) -> str:
    every = [*installed(RUNTIME_BUILDS), *installed(GENAI_BUILDS)]
    gpu = any(name.endswith(("-gpu", "-cuda")) for name in here)
    extra = EXTRAS["onnxruntime-gpu" if gpu else "onnxruntime"]
    named = " and ".join(f"{name} {version}" for name, version in here.items())
    return (
        f"{named} are installed over each other, and what was installed last decides which providers there are. "
        f"Run: pip uninstall -y {' '.join(every)} && pip install 'optkit[{extra}]'"
    )
