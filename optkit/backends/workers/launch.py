"""Entry of every worker: `python -P launch.py NAME DESCRIPTOR`, run in the environment of library
NAME, where there is no optkit.

In: one JSON line on stdin (the fields of `Job`); stdin stays open for as long as the parent lives.
Out: JSON lines on the file descriptor; stdout and stderr belong to the library.

    {"type": "start", "label": "autoawq", "total": 30, "unit": "blocks"}      a bar
    {"type": "advance", "steps": 1, "note": "model.layers.3"}
    {"type": "warn", "line": "..."}
    {"type": "logits", "file": ".../logits.safetensors"}                      what this transformers makes of
                                                                              the float model
    {"type": "result", "details": {...}}                                      the last line of a worker that is done
    {"type": "error", "exception": "ValueError", "message": "first line"}     the last line of one that failed
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


class Job:
    """What a worker has to do, and how it says that it is getting on."""

    def __init__(self, request: dict[str, Any], descriptor: int) -> None:
        self.method: str = request["method"]
        """`gptq`, `awq`, `rtn` or `export`."""
        self.source = Path(request["source"])
        """A float checkpoint that this environment's transformers reads."""
        self.target = Path(request["target"])
        """An empty directory for config.json and safetensors."""
        self.layers: dict[str, dict[str, Any]] = request["layers"]
        """Layer to quantize -> `bits`, `group_size` (-1: one per channel), `symmetric`."""
        self.kept: list[str] = request["kept"]
        """Linear layers that stay as they are."""
        self.quantization: dict[str, Any] = request["quantization"]
        """The `quantization_config` that optkit writes for these layers, for libraries that have
        none of their own.
        """
        self.blocks: int = request["blocks"]
        self.fields: dict[str, Any] = request["fields"]
        """The recipe's further fields."""
        self.device: str = request["device"]
        self.dtype: str = request["dtype"]
        """The checkpoint's, e.g. `bfloat16`."""
        self.windows: list[list[int]] = request["windows"]
        """Calibration tokens, all windows of one length; none for methods without calibration."""
        self.probe: list[int] = request["probe"]
        """Tokens to compare logits on."""
        self._messages = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def start(self, label: str, total: int, unit: str) -> None:
        """Open a bar."""
        self.send(type="start", label=label, total=total, unit=unit)

    def advance(self, note: str = "", steps: int = 1) -> None:
        """Move the bar."""
        self.send(type="advance", steps=steps, note=note)

    def warn(self, line: str) -> None:
        """Say what the user must not miss."""
        self.send(type="warn", line=line)

    def send(self, **message: Any) -> None:
        """Write one line to the parent."""
        self._messages.write(json.dumps(message) + "\n")

    def torch_dtype(self) -> Any:
        """Return the checkpoint's dtype."""
        import torch

        return getattr(torch, self.dtype)

    def load_model(self) -> Any:
        """Return the float model in its own dtype, on the CPU."""
        from transformers import AutoModelForCausalLM

        name = "dtype" if _transformers_major() >= 5 else "torch_dtype"
        return AutoModelForCausalLM.from_pretrained(
            self.source, local_files_only=True, **{name: self.torch_dtype()}
        ).eval()


def _transformers_major() -> int:
    import transformers

    return int(transformers.__version__.partition(".")[0])


def _show_logits(job: Job) -> None:
    """Save what this environment's transformers makes of the float model: float32 [tokens,
    vocabulary].
    """
    import torch
    from safetensors.torch import save_file

    with torch.inference_mode():
        logits = job.load_model()(torch.tensor([job.probe])).logits[0].float().contiguous()
    file = job.target.parent / "logits.safetensors"
    save_file({"logits": logits.clone()}, file)
    job.send(type="logits", file=str(file))


def _end_with_parent() -> None:
    """Wait for the end of stdin, which comes when the parent is gone, and end this process and its
    children.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_request() -> dict[str, Any]:
    """Return the first line of stdin, read without a buffer that the watching thread would miss."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            sys.exit("the parent went before it had said what to do")
        line += part
    request: dict[str, Any] = json.loads(line)
    return request


def main(name: str, descriptor: int) -> int:
    """Do the work and return the exit status."""
    job = Job(_read_request(), descriptor)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if job.probe:
            _show_logits(job)
        spec = importlib.util.spec_from_file_location(f"worker_{name}", Path(__file__).with_name(f"{name}.py"))
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"there is no worker {name}")
        worker = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(worker)
        details = worker.export(job) if job.method == "export" else worker.quantize(job)
    except BaseException as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = next(
            iter(str(error).strip().splitlines()), f"{last.line} ({Path(last.filename).name}, line {last.lineno})"
        )
        job.send(type="error", exception=type(error).__name__, message=message)
        return 1
    job.send(type="result", details=details)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
