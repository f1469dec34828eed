"""Setting `onnx_provider`: what computes an ONNX model, and what generates with it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.common.field_types import Count, Distinct
from optkit.model.task import KNOWN_TASKS, Task
from optkit.onnx.builds import GENAI_BUILDS, installed
from optkit.stage import Format, Setting

Name = Literal["cpu", "cuda", "tensorrt", "openvino", "directml", "coreml"]


class OnnxProvider(Setting):
    """Choose what generates, or the execution providers of ONNX Runtime in their order.
    The scorecard says which ones really computed.

    Without this setting: ONNX Runtime, on the provider of the device, `cpu` or `cuda`. Nodes that
    none has a kernel for run on the CPU.
    """

    kind: ClassVar[str] = "onnx_provider"
    example: ClassVar[str] = "- onnx: {target: cpu}\n- onnx_provider: {threads: 4}"
    for_tasks: ClassVar[frozenset[Task]] = KNOWN_TASKS
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})

    engine: Literal["onnxruntime", "onnxruntime-genai"] = "onnxruntime"
    """What generates, and is timed: ONNX Runtime, its KV cache kept by optkit, or ONNX Runtime
    GenAI, which does it all itself and reads genai_config.json. Logits are computed by ONNX Runtime
    in either case."""
    providers: Distinct[Name] = ()
    """In their order, each for the nodes that those before leave: `tensorrt` and `cuda` want a CUDA
    device, the others the CPU's memory. The first must start, or opening fails. Each needs its
    build of onnxruntime, which the error names."""
    threads: Count | None = None
    """Threads of one operation on the CPU; left out: as many as torch uses."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self == type(self).model_construct():
            raise ValueError("it says nothing: set engine, providers or threads")
        if self.providers and self.engine == "onnxruntime-genai":
            raise ValueError(
                "ONNX Runtime GenAI computes on the provider of the device: leave providers out, or engine"
            )
        return self

    def made_with(self) -> dict[str, Any]:
        """Return the version of GenAI if it generates: another one has other timings."""
        return {"packages": installed(GENAI_BUILDS)} if self.engine == "onnxruntime-genai" else {}

    def load_kwargs(self, device: str) -> dict[str, Any]:
        """Return what `OnnxSession` takes: `providers` and `threads`.
        `engine` is there if it is another one.
        """
        engine = {} if self.engine == "onnxruntime" else {"engine": self.engine}
        return {"providers": self.providers, "threads": self.threads, **engine}

    def describe(self, device: str) -> str:
        """Return e.g. `onnx_provider: tensorrt, cuda; 8 threads`."""
        said: list[str] = [self.engine] if self.engine != "onnxruntime" else []
        said += [", ".join(self.providers)] if self.providers else []
        said += [f"{self.threads} threads"] if self.threads else []
        return f"onnx_provider: {'; '.join(said)}"
