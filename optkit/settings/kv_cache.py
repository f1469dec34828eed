"""Setting `kv_cache`: keys and values of past tokens are kept as codes of 4 or 8 bits.
Or those of a window alone are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from optkit.common.field_types import Amount, GroupSize, SequenceLength
from optkit.errors import StageError
from optkit.model.attention import head_sizes, refuse_other_states, refuse_own_windows
from optkit.model.shape import ModelShape
from optkit.settings.speculative import Speculative
from optkit.stage import Setting

BITS = {"int4": 4, "int8": 8}
MASKLESS = frozenset({"bloom", "opt", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"})
"""`model_type` of those whose code makes masks of the padding of a batch alone."""


class KvCache(Setting):
    """Keep the KV cache in 4 or 8 bits, or only for a window of tokens.
    Perplexity is measured with the same cache.

    Keys and values are coded token by token before attention sees them. Left out, they grow as
    floats with every token; with `compile` they lie in a static cache.
    """

    kind: ClassVar[str] = "kv_cache"
    example: ClassVar[str] = "- kv_cache: {dtype: int8}"
    exact: ClassVar[bool] = False
    version: ClassVar[int] = 2
    shorthand: ClassVar[str] = "dtype"

    dtype: Literal["int8", "int4", "fp8"] | None = None
    """null: floats. `int8`, `int4`: a scale and a zero point for each token's head or group of
    channels. `fp8`: E4M3 with one scale for the keys and one for the values of a layer, as in
    vLLM: those of `kv_scales` if the checkpoint holds them, else 1."""
    group_size: GroupSize | None = None
    """Channels of a head that share a scale, for int8 and int4. null: all of them."""
    window: SequenceLength | None = None
    """Tokens that a token sees, itself among them; what lies further back is forgotten, so memory
    and the time of a step stop growing. It changes what the model says of longer texts. For models
    without sliding windows of their own."""
    sinks: Amount | None = Field(default=None, validate_default=True)
    """How many of the window are the first tokens of the text (StreamingLLM, arXiv:2309.17453),
    without which most models fall apart: 4.
    """

    @field_validator("sinks")
    @classmethod
    def _of_a_window(cls, given: int | None, info: ValidationInfo) -> int | None:
        window = info.data.get("window")
        return min(4, window - 2) if given is None and window else given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.dtype is None and self.window is None:
            raise ValueError("set dtype, window, or both")
        if self.group_size is not None and self.dtype not in BITS:
            if self.dtype == "fp8":
                raise ValueError("fp8 has one scale for a layer: leave group_size out, or set dtype: int8")
            raise ValueError("floats have no groups: leave group_size out, or set dtype: int8")
        if self.window is None:
            if self.sinks is not None:
                raise ValueError("sinks belong to a window: set window too")
            return self
        if (self.sinks or 0) > self.window - 2:
            raise ValueError(
                f"a window of {self.window} tokens has no room for {self.sinks} sinks, the token "
                "itself and the one before it"
            )
        return self

    def excludes(self, other: Setting, device: str) -> str:
        """Return why a window cannot be kept beside another setting."""
        if self.window and isinstance(other, Speculative):
            return (
                "Tokens that were proposed in vain have to be taken out of the KV cache, and a window "
                "has forgotten others for them"
            )
        return ""

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for a window beside layers that forget by themselves, and for other caches."""
        if self.window:
            refuse_own_windows(shape.config, "kv_cache.window")
            if (kind := shape.config.get("model_type")) in MASKLESS:
                raise StageError(
                    f"the attention of {kind} takes no mask of what each token sees",
                    where="kv_cache.window",
                    why="Its code makes one of the padding of a batch alone",
                    remedy="Take window out of the recipe for this architecture",
                )
        refuse_other_states(shape.config, "kv_cache", "These alone can be coded", "Take kv_cache out", beside=True)

    def on_load(self, model: Any, device: str) -> Any:
        """Return the model; with a window its calls mask what lies outside. Raises StageError if
        they cannot.
        """
        from optkit.kernels.attention_window import see_window_

        if self.window:
            see_window_(model, self.window, self.sinks or 0, "kv_cache.window")
        return model

    def cache(self, model: Any, scales: Any) -> Any:
        """Return what makes the model an empty coded cache.

        Raises StageError if group_size does not fit the heads or the model keeps something else
        than keys and values.
        """
        from optkit.algorithms.state_codes import Float8Code, IntegerCode, PlainCode, StateCode
        from optkit.kernels.kv_cache import coded_cache, stored_codes
        from optkit.model.carried_state import check_keys_and_values

        check_keys_and_values(model, "kv_cache")
        if self.dtype == "fp8":
            codes = stored_codes(scales) if scales else (Float8Code(), Float8Code())
            return coded_cache(model.config, codes, "kv_cache", self.window, self.sinks or 0)
        if self.dtype is None:
            return coded_cache(model.config, (PlainCode(), PlainCode()), "kv_cache", self.window, self.sinks or 0)
        for size in sorted(set(head_sizes(model.config.get_text_config(decoder=True)))):
            self._check_heads(size)
        code: StateCode = IntegerCode(BITS[self.dtype], self.group_size)
        return coded_cache(model.config, (code, code), "kv_cache", self.window, self.sinks or 0)

    def _check_heads(self, size: int) -> None:
        """Raise StageError for heads whose channels cannot be coded as asked."""
        if size % (self.group_size or size) or (self.dtype == "int4" and size % 2):
            raise StageError(
                f"heads of {size} channels are not made of groups of {self.group_size}"
                if self.group_size
                else f"heads of {size} channels",
                where="kv_cache",
                why="Groups may not reach over two heads" if self.group_size else "Two codes of 4 bits share a byte",
                remedy=f"Use {size}, {size // 2} or null"
                if self.group_size and not size % 2
                else "Use dtype: int8 without group_size",
            )

    def describe(self, device: str) -> str:
        """Return e.g. `kv_cache: int4 (groups of 32), a window of 1024 tokens, the first 4`."""
        groups = f" (groups of {self.group_size})" if self.group_size else ""
        window = f"a window of {self.window} tokens, {self.sinks} of them the first" if self.window else ""
        return f"kv_cache: {', '.join(filter(None, (self.dtype and f'{self.dtype}{groups}', window)))}"
