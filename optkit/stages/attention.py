"""Setting `attention`: which attention implementation of transformers the model is opened with."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from optkit.errors import MissingPackageError, StageError
from optkit.stage import Setting
from optkit.stages.compile import allow_many_shapes, silence_advice


class Attention(Setting):
    """Open the model with an attention implementation; `save_pretrained` would forget it, the artifact does not."""

    shorthand: ClassVar[str] = "implementation"

    implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"]
    """`sdpa`: torch's fused attention. `flash_attention_2`: the package flash-attn, CUDA alone. `flex_attention`: torch's compiled one.
    `eager`: plain matrix products."""

    def load_kwargs(self, device: str) -> dict[str, Any]:
        """Return `attn_implementation`. Raises StageError where the device has none, MissingPackageError where its package is not there."""
        if self.implementation == "flash_attention_2":
            if not device.startswith("cuda"):
                raise StageError(
                    f"flash_attention_2 does not run on {device}",
                    where="attention",
                    why="Its kernels are written for NVIDIA GPUs",
                    remedy="Use sdpa, which is fused on every device",
                )
            if find_spec("flash_attn") is None:
                raise MissingPackageError("flash-attn", where="attention: flash_attention_2")
        return {"attn_implementation": self.implementation}

    def on_load(self, model: Any, device: str) -> Any:
        """Return the model as it is. Raises StageError where the implementation cannot compute what this model asks for."""
        if self.implementation == "flash_attention_2" and str(model.dtype) not in ("torch.bfloat16", "torch.float16"):
            raise StageError(
                f"flash_attention_2 does not compute in {str(model.dtype).removeprefix('torch.')}",
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
                    why=f"What torch 2.13 writes for such a step does not compile, and layers here see {window:,} tokens back",
                    remedy="Use sdpa or eager, or a GPU",
                )
            silence_advice()
            allow_many_shapes()
        return model

    def describe(self, device: str) -> str:
        """Return e.g. `attention: sdpa`."""
        return f"attention: {self.implementation}"


def _sliding_window(config: Any) -> int | None:
    """Return how many tokens back the layers with a sliding window see, None where every layer sees all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return window if positions is None or window < positions else None
