"""Setting `cpu_decoder`: the decode step of a float model as one call of optkit's own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from optkit.errors import StageError
from optkit.kernels.cpu.families import why_not_config
from optkit.model.shape import ModelShape
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.settings.offload import Offload
from optkit.settings.speculative import Speculative
from optkit.settings.tensor_parallel import TensorParallel
from optkit.stage import Format, Setting

REMEDY = "Take cpu_decoder out of the recipe"


class CpuDecoder(Setting):
    """Decode on the CPU by one call of optkit's own kernels a token, as packed weights are without
    this. It takes models of the Llama family, in float32 or bfloat16.

    Activations and the KV cache of decode steps are float32. Prompts run through optkit's kernels
    too, bfloat16 weights through torch's products. On GPUs nothing changes.
    """

    kind: ClassVar[str] = "cpu_decoder"
    example: ClassVar[str] = "- gptq: {bits: 4, group_size: 32}\n- cpu_decoder"
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        if self.applies(device) and (reason := why_not_config(shape.config)):
            raise _refused(reason)

    def excludes(self, other: Setting, device: str) -> str:
        """Return why the kernels cannot be used beside another setting.
        On GPUs, where they are off, such a recipe is refused too.
        """
        decides = Speculative | KvCache | TensorParallel | Offload
        if isinstance(other, decides) or (isinstance(other, Compile) and other.applies("cpu")):
            return "Each of them decides how a token is decoded"
        if other.changes_products():
            return "The kernels compute in float32, and what the other asks for would be left out"
        return ""

    def applies(self, device: str) -> bool:
        return device == "cpu"

    def on_open(self, session: Any) -> Any:
        """Return the session, its decode steps computed by the kernels.
        Raises StageError for another step than they know.
        """
        if not self.applies(session.device):
            return session
        from optkit.kernels.cpu.decoding import StepDecoder, why_not_step
        from optkit.kernels.cpu.huge_pages import into_huge_pages_

        reason = "its KV cache holds codes" if session.codes_cache else why_not_step(session.model)
        if reason:
            raise _refused(reason)
        if not session.decodes_itself:
            into_huge_pages_(session.model)
            session.decode_with(StepDecoder(session.model))
        return session

    def step_mode(self, device: str) -> str:
        return self.kind if self.applies(device) else ""


def _refused(reason: str) -> StageError:
    return StageError(f"the decode step of this model cannot be one call: {reason}", where="cpu_decoder", remedy=REMEDY)
