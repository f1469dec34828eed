"""Open an ONNX file with ONNX Runtime on a provider, and explain in our words what went wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.common.out_of_resources import NO_MEMORY
from optkit.errors import MissingPackageError, OptkitError, ResourceError, SourceError, needing

SILENT = 4
"""ONNX Runtime's log level for fatal errors alone: every other error is raised, and told by us."""
MEMORY_SIGNS = (*NO_MEMORY, "Failed to allocate memory", "bad allocation", "bad_alloc", "Available memory of")
REFUSALS = (
    (
        "Unsupported model IR version|Current official support for domain|is under development and support",
        "the graph is newer than {ours}",
        "Run: pip install -U onnxruntime; or export it again for an older opset",
    ),
    (
        r"Fatal error: (\S+?)\(-?\d+\) is not a registered function/op|No Op registered for (\S+) with domain_version"
        r"|Unrecognized attribute: \S+ for operator (\S+)",
        "{ours} does not know {name} as the graph uses it",
        "It was made for another version. Run: pip install -U onnxruntime; or export it again",
    ),
    (
        r"Could not find an implementation for (\S+) node",
        "ONNX Runtime has no kernel of {name} for the dtypes that it gets here on {device}",
        "Export it in float32 or float16, or run it on another device",
    ),
)
"""What ONNX Runtime says of a graph, with the operator that it is about; our words for it, and what
to do.
"""

HIDDEN_MEMORY = "ONNX Runtime allocates memory of the GPU itself, and torch does not see it"


@dataclass(frozen=True)
class Provider:
    """What computes a graph."""

    name: str
    """As ONNX Runtime calls it."""
    package: str
    """The distribution that brings it."""
    device: str = "cpu"
    """Whose memory inputs and outputs lie in."""


PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider", "onnxruntime"),
    "cuda": Provider("CUDAExecutionProvider", "onnxruntime-gpu", "cuda"),
    "tensorrt": Provider("TensorrtExecutionProvider", "onnxruntime-gpu", "cuda"),
    "openvino": Provider("OpenVINOExecutionProvider", "onnxruntime-openvino"),
    "directml": Provider("DmlExecutionProvider", "onnxruntime-directml"),
    "coreml": Provider("CoreMLExecutionProvider", "onnxruntime"),
}


@dataclass(frozen=True)
class Opened:
    """A session of ONNX Runtime and what it really runs on."""

    session: Any
    """`onnxruntime.InferenceSession`"""
    providers: tuple[str, ...]
    """In their order; the first is the one that was asked for."""
    nodes: dict[str, int]
    """How many nodes of the optimised graph each provider computes; empty if ONNX Runtime does
    not tell.
    """

    def note(self) -> str:
        """Return a sentence on what computes the graph."""
        import onnxruntime

        counts = self.nodes
        shares = [
            f"{name} ({counts[name]} nodes)" if name in counts else name
            for name in self.providers
            if counts.get(name, 1)
        ]
        return f"onnxruntime {onnxruntime.__version__}: computed by {', '.join(shares)}"


def open_model(model: Path, device: str = "cpu", threads: int | None = None, providers: Sequence[str] = ()) -> Opened:
    """Open an ONNX file on a device.
    `providers` are keys of `PROVIDERS` in their order, by default the device's name.

    `threads`: those within one operation, torch's own number if None. Nodes that no provider has a
    kernel for run on the CPU. Raises MissingPackageError if a provider is not installed, and
    ResourceError without memory. Raises SourceError if ONNX Runtime refuses the graph: too new for
    it, an operation or dtype without a kernel, damage; OptkitError if a provider does not fit the
    device, and if ONNX Runtime could not start the first one.
    """
    kind, _, index = device.partition(":")
    wanted = [_provider(name, kind, str(model)) for name in providers or (kind,)]
    ort = import_runtime(str(model))
    for each in wanted:
        if each.name not in ort.get_available_providers():
            raise MissingPackageError(each.package, where=f"{each.name} of ONNX Runtime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or torch_threads()
    options.log_severity_level = SILENT
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    order = [(each.name, {"device_id": int(index or 0)} if each.device == "cuda" else {}) for each in wanted]
    if PROVIDERS["cpu"] not in wanted:
        order.append((PROVIDERS["cpu"].name, {}))
    if kind == "cuda" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    with runtime_errors(
        "while it was opened",
        str(model),
        device,
        "Open it on a device with more memory, or export it in a smaller dtype",
    ):
        session = ort.InferenceSession(str(model), options, providers=order)
    used = tuple(session.get_providers())
    if used[0] != wanted[0].name:
        build = f"{wanted[0].package} {ort.__version__}"
        raise OptkitError(
            f"ONNX Runtime could not start {wanted[0].name} and fell back to {used[0]}",
            where=str(model),
            why=f"A library that {build} needs (for GPUs its CUDA and cuDNN) is not there, or the driver is too old",
            remedy=f"Install what {build} asks for, or use --device cpu",
        )
    return Opened(session, used, _assigned(session))


@contextmanager
def runtime_errors(
    what: str, where: str, device: str = "cpu", remedy: str = "Use a machine with more memory"
) -> Iterator[None]:
    """Turn the errors of ONNX Runtime into ours; `remedy` is what to do without memory."""
    try:
        yield
    except OptkitError:
        raise
    except MemoryError as error:
        raise ResourceError(f"out of memory {what} on {device}", where=where, remedy=remedy) from error
    except Exception as error:  # the classes of ONNX Runtime's errors have no parent of their own
        reason = _reason(error)
        if any(sign in str(error) for sign in MEMORY_SIGNS):
            raise ResourceError(f"out of memory {what} on {device}", where=where, why=reason, remedy=remedy) from error
        ours = f"onnxruntime {import_runtime(where).__version__}"
        for pattern, said, otherwise in REFUSALS:
            if found := re.search(pattern, reason):
                name = next(filter(None, found.groups()), "")
                told = said.format(ours=ours, name=name, device=device)
                raise SourceError(told, where=where, why=reason, remedy=otherwise) from error
        raise SourceError(f"ONNX Runtime failed {what}", where=where, why=reason) from error


def import_runtime(where: str) -> Any:
    """Return the module `onnxruntime`; raises MissingPackageError if it is not installed."""
    with needing("onnxruntime", where, "optkit[onnx]"):
        import onnxruntime
    return onnxruntime


def _provider(name: str, device: str, where: str) -> Provider:
    if name not in PROVIDERS:
        raise OptkitError(f"there is no provider '{name}'", where=where, remedy=f"Known: {', '.join(PROVIDERS)}")
    found = PROVIDERS[name]
    if found.device != device and name != "cpu":
        raise OptkitError(
            f"the provider {name} does not compute on {device}", where=where, remedy=f"Use --device {found.device}"
        )
    return found


def torch_threads() -> int:
    """Return how many threads torch computes with, so that both models of a scorecard have as many."""
    import torch

    return torch.get_num_threads()


def _assigned(session: Any) -> dict[str, int]:
    try:
        parts = session.get_provider_graph_assignment_info()
    except (AttributeError, RuntimeError):
        return {}
    counts: Counter[str] = Counter()
    for part in parts:
        counts[part.ep_name] += len(part.get_nodes())
    return dict(counts)


def _reason(error: Exception) -> str:
    """Return what ONNX Runtime says, without codes, source files and signatures."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error)).strip()
    text = re.sub(r"/\S+\.(?:cc|h|cu):\d+ .*?\) (?=[A-Z])", "", text)
    text = re.sub(
        r"^(?:Load model from .*? failed:|Error in execution: Non-zero status code returned while running )", "", text
    )
    return " ".join(text.split())[:400] or type(error).__name__
