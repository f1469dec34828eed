"""Setting `attention`: which attention implementation of transformers the model is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from optkit.common.field_types import Form
from optkit.environment import compute_capability
from optkit.errors import MissingPackageError, StageError
from optkit.model.attention_choice import asked_of_attention, caps_scores, why_not_attention
from optkit.model.compiling import allow_many_shapes, silence_advice
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, Task
from optkit.source.hub_kernels import NAME, AttentionKernel, why_not_function
from optkit.stage import Setting

FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Implementation -> the module that its package brings."""
FLASH_3_COMMAND = (
    "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && python setup.py install"
)
HOPPER = 9
KernelName = Annotated[str, Field(max_length=1000), Form(NAME, "a kernel of the hub, as kernels-community/flash-attn2")]


class Attention(Setting):
    """Choose the attention implementation that the model is opened with.
    The artifact remembers it; `save_pretrained` would not.
    """

    kind: ClassVar[str] = "attention"
    example: ClassVar[str] = "- attention: sdpa"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    shorthand: ClassVar[str] = "implementation"

    implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | KernelName
    """`sdpa`: torch's fused attention. `flash_attention_2`: the package flash-attn, CUDA alone.
    `flash_attention_3`: flash-attn-3, Hopper GPUs alone. `flex_attention`: torch's compiled one.
    `eager`: plain matrix products. One that would leave out a model's soft cap (Gemma 2) or
    attention sinks is refused. Or a kernel of the hub, like `kernels-community/flash-attn2`, with
    `@revision` and `:function` behind it if wanted, which the package `kernels` loads; its
    revision is pinned to a commit. `$LOCAL_KERNELS` (`owner/name=directory`) takes one from a
    directory."""

    def pinned(self, data: Path | None) -> Self:
        """Return the setting with a kernel's revision as a commit. Raises SourceError,
        MissingPackageError.
        """
        return self.model_copy(update={"implementation": str(self._kernel.pinned())}) if self._kernel else self

    @property
    def _kernel(self) -> AttentionKernel | None:
        return AttentionKernel.parse(self.implementation) if "/" in self.implementation else None

    def applies(self, device: str) -> bool:
        """Return whether it is another than `sdpa`, which transformers takes by itself."""
        return self.implementation != "sdpa"

    def foreign_code(self) -> str:
        return f"the kernel {self.implementation} of the hub" if self._kernel else ""

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError if the device lacks such attention, or it drops what the model asks for.
        A kernel that is not to be had is refused too.

        MissingPackageError without its package.
        """
        if why := why_not_attention(shape.config, self.implementation):
            raise self._drops(shape.config, why)
        self._require(device)
        capability = compute_capability(device)
        if self.implementation == "flash_attention_3" and capability is not None and capability[0] != HOPPER:
            raise StageError(
                f"flash_attention_3 does not run on this GPU (compute capability {capability[0]}.{capability[1]})",
                where="attention",
                why="Its kernels are written for Hopper (9.0)",
                remedy="Use flash_attention_2 or sdpa",
            )

    def load_kwargs(self, device: str) -> dict[str, Any]:
        """Return `attn_implementation`; a kernel of the hub is loaded. Raises StageError and
        MissingPackageError as `check` does.
        """
        self._require(device)
        if self._kernel:
            self._kernel.load()
        return {"attn_implementation": self.implementation}

    def _refuse_to_drop(self, config: Any) -> None:
        """Raise StageError if the model asks its attention for what this one leaves out.
        It does so too if transformers took another one for it.
        """
        fields, taken = config.to_dict(), str(config._attn_implementation)
        why = why_not_attention(fields, self.implementation)
        if self._kernel and AttentionKernel.parse(taken).repository != self._kernel.repository:
            why = f"transformers takes {taken} for this model instead"
        elif not why and (self._kernel or self.implementation in FLASH) and (asked := asked_of_attention(fields)):
            why = why_not_function(taken, asked)
        if why:
            raise self._drops(fields, why)

    def _drops(self, config: Mapping[str, Any], why: str) -> StageError:
        return StageError(
            f"{self.implementation} does not compute the attention of {config.get('model_type')}",
            where="attention",
            why=why,
            remedy="Use eager or flex_attention" if caps_scores(config) else "Use eager",
        )

    def _require(self, device: str) -> None:
        if self._kernel:
            self._kernel.check(device)
        if package := FLASH.get(self.implementation):
            if not device.startswith("cuda"):
                raise StageError(
                    f"{self.implementation} does not run on {device}",
                    where="attention",
                    why="Its kernels are written for NVIDIA GPUs",
                    remedy="Use sdpa, which is fused on every device",
                )
            if find_spec(package) is None:
                command = FLASH_3_COMMAND if self.implementation == "flash_attention_3" else ""
                distribution = "flash-attn-3" if command else "flash-attn"
                raise MissingPackageError(distribution, where=f"attention: {self.implementation}", command=command)

    def on_load(self, model: Any, device: str) -> Any:
        """Return the model as it is. Raises StageError if the implementation cannot compute what
        this model asks for.
        """
        self._refuse_to_drop(model.config)
        on_gpu = self._kernel is not None and device.startswith("cuda") and "flash" in self.implementation
        if (on_gpu or self.implementation in FLASH) and str(model.dtype) not in ("torch.bfloat16", "torch.float16"):
            raise StageError(
                f"{self.implementation} does not compute in {str(model.dtype).removeprefix('torch.')}",
                where="attention",
                why="Its kernels are written for bfloat16 and float16",
                remedy="Put `- cast: {dtype: bfloat16}` in the recipe, or use sdpa",
            )
        if self.implementation == "flex_attention":
            sinks = next((name for name, _ in model.named_parameters() if name.endswith(".sinks")), None)
            if sinks and device == "cpu":
                raise StageError(
                    f"flex_attention has no attention sinks on the CPU, and the model has them ({sinks})",
                    where="attention",
                    remedy="Use eager, or a GPU",
                )
            if device == "cpu" and (window := _sliding_window(model.config.get_text_config(decoder=True))):
                raise StageError(
                    "flex_attention cannot generate with a sliding window on the CPU",
                    where="attention",
                    why="What torch 2.13 writes for such a step does not compile, and layers here "
                    f"see {window:,} tokens back",
                    remedy="Use sdpa or eager, or a GPU",
                )
            silence_advice()
            allow_many_shapes()
        return model

    def describe(self, device: str) -> str:
        """Return e.g. `attention: sdpa`."""
        return f"attention: {self.implementation}"


def _sliding_window(config: Any) -> int | None:
    """Return how many tokens back the layers with a sliding window see.
    None if every layer sees all.
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return window if positions is None or window < positions else None
