"""Setting `onnx_provider`: what ONNX Runtime computes an ONNX model on."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.stage import Format, Setting

Name = Literal["cpu", "cuda", "tensorrt", "openvino", "directml", "coreml"]


class OnnxProvider(Setting):
    """Choose the execution providers of ONNX Runtime and their order; the scorecard says which ones really computed, and how many nodes.

    Without this setting: the provider of the device, `cpu` or `cuda`. Nodes that none of them has a kernel for run on the CPU.
    """

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})

    providers: tuple[Name, ...] = ()
    """In their order, each for the nodes that those before leave: `tensorrt` and `cuda` want a CUDA device, the others the CPU's memory.
    The first must start, or opening fails. Each needs its build of onnxruntime, which the error names."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of one operation on the CPU; left out: as many as torch uses."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.providers and self.threads is None:
            raise ValueError("it says nothing: set providers or threads")
        if len(set(self.providers)) < len(self.providers):
            raise ValueError("a provider is named twice")
        return self

    def load_kwargs(self, device: str) -> dict[str, Any]:
        """Return what `OnnxSession` takes: `providers` and `threads`."""
        return {"providers": self.providers, "threads": self.threads}

    def describe(self, device: str) -> str:
        """Return e.g. `onnx_provider: tensorrt, cuda; 8 threads`."""
        said = [", ".join(self.providers)] if self.providers else []
        return f"onnx_provider: {'; '.join([*said, *([f'{self.threads} threads'] if self.threads else [])])}"
