"""Setting `kv_cache`: keys and values of past tokens are kept as codes of 4 or 8 bits."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.errors import StageError
from optkit.stage import Setting

BITS = {"int4": 4, "int8": 8}


class KvCache(Setting):
    """Keep the KV cache in 4 or 8 bits; keys and values are coded token by token before attention sees them, in prompts too."""

    shorthand: ClassVar[str] = "dtype"

    dtype: Literal["int8", "int4", "fp8"]
    """`int8`, `int4`: a scale and a zero point for each token's head or group of channels. `fp8`: E4M3 with one scale for the keys and one
    for the values of a layer, those of `kv_scales` where the checkpoint holds them, else 1, as in vLLM."""
    group_size: int | None = Field(default=None, ge=8)
    """Channels of a head that share a scale, for int8 and int4. null: all of them."""

    @model_validator(mode="after")
    def _groups_of_integers(self) -> Self:
        if self.dtype == "fp8" and self.group_size is not None:
            raise ValueError("fp8 has one scale for a layer: leave group_size out, or set dtype: int8")
        return self

    def cache(self, model: Any, scales: Any) -> Any:
        """Return what makes the model an empty coded cache.

        Raises StageError where group_size does not fit the heads or the model keeps something else than keys and values.
        """
        from optkit.algorithms.state_codes import Float8Code, IntegerCode, StateCode
        from optkit.kernels.kv_cache import coded_cache, stored_codes

        if self.dtype == "fp8":
            codes = stored_codes(scales) if scales else (Float8Code(), Float8Code())
            return coded_cache(model.config, codes, "kv_cache")
        config = model.config.get_text_config(decoder=True)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if size % (self.group_size or size) or (self.dtype == "int4" and size % 2):
            raise StageError(
                f"heads of {size} channels are not made of groups of {self.group_size}" if self.group_size else f"heads of {size} channels",
                where="kv_cache",
                why="Groups may not reach over two heads" if self.group_size else "Two codes of 4 bits share a byte",
                remedy=f"Use {size}, {size // 2} or null" if self.group_size and not size % 2 else "Use dtype: int8 without group_size",
            )
        code: StateCode = IntegerCode(BITS[self.dtype], self.group_size)
        return coded_cache(model.config, (code, code), "kv_cache")

    def describe(self, device: str) -> str:
        """Return e.g. `kv_cache: int4 (groups of 32)`."""
        groups = f" (groups of {self.group_size})" if self.group_size else ""
        return f"kv_cache: {self.dtype}{groups}"
