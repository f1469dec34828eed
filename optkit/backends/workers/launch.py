"""What a worker does with a request, in the environment of a library, without optkit.

Beside the messages of `optkit/processes/child_program.py`, which runs this file, it tells what the
transformers there makes of the float model: `{"type": "logits", "file": ".../logits.safetensors"}`.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optkit.processes.child_program import Parent, RemoteTask


class Job:
    """What a worker has to do, and how it says that it is getting on."""

    def __init__(self, request: dict[str, Any], parent: Parent) -> None:
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
        self.seed: int = request["seed"]
        """The recipe's, for whatever a library draws."""
        self.windows: list[list[int]] = request["windows"]
        """Calibration tokens, all windows of one length; none for methods without calibration."""
        self.probe: list[int] = request["probe"]
        """Tokens to compare logits on."""
        self.parent = parent
        self._library: str = request["worker"]
        self._bar: RemoteTask

    def start(self, label: str, total: int, unit: str) -> None:
        self._bar = self.parent.task(label, total, unit)

    def advance(self, note: str = "", steps: int = 1) -> None:
        self._bar.advance(steps, note)

    def warn(self, line: str) -> None:
        self.parent.warn(f"{self._library}: {line}")

    def torch_dtype(self) -> Any:
        """Return the checkpoint's dtype."""
        import torch

        return getattr(torch, self.dtype)

    def load_model(self) -> Any:
        """Return the float model in its own dtype, on the CPU."""
        from transformers import AutoModelForCausalLM, __version__

        name = "dtype" if int(__version__.partition(".")[0]) >= 5 else "torch_dtype"
        return AutoModelForCausalLM.from_pretrained(
            self.source, local_files_only=True, **{name: self.torch_dtype()}
        ).eval()


def _save_logits(job: Job) -> Path:
    """Save the logits of the float model by this environment's transformers.
    They are float32 [tokens, vocabulary].
    """
    import torch
    from safetensors.torch import save_file

    with torch.inference_mode():
        logits = job.load_model()(torch.tensor([job.probe])).logits[0].float().contiguous()
    file = job.target.parent / "logits.safetensors"
    save_file({"logits": logits.clone()}, file)
    return file


def work(parent: Parent) -> dict[str, Any]:
    """Do what a request says, and return the details of the result."""
    request = parent.order()
    job = Job(request, parent)
    if job.probe:
        parent.tell("logits", file=str(_save_logits(job)))
    library = runpy.run_path(str(Path(__file__).with_name(f"{request['worker']}.py")))
    details: dict[str, Any] = library["export" if job.method == "export" else "quantize"](job)
    return details
