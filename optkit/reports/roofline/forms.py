"""The forms that a model's weights could have: their bytes, and the dtype of products."""

from __future__ import annotations

import re
from dataclasses import dataclass

from optkit.errors import UsageError

FLOATS = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16}
GROUPED = re.compile(r"int4g(\d+)")
BESIDE_GROUP = 32
"""Bits of a group's scale and zero point, 16 each, as torch's int4 kernels and torchao keep them."""
DEFAULT_FORMS = ("bf16", "int8", "fp8", "int4g128")
STORED = "stored"


@dataclass(frozen=True)
class Form:
    """How the matrices of the decoder blocks are stored, and what they are multiplied in.
    All else stays as `wide` says.
    """

    name: str
    bits: float | None
    """Of a weight of the blocks, with its share of scales; None: as the files hold it."""
    arithmetic: str
    """What products of the blocks are computed in: a key of `Device.rates`; `int8` and `fp8` round
    the inputs too.
    """
    wide: str
    """What everything else is kept and computed in: lm_head, embeddings, norms, the KV cache."""

    @property
    def wide_bytes(self) -> int:
        return FLOATS[self.wide] // 8

    @property
    def label(self) -> str:
        """What stands above a column, e.g. `int4 g128`."""
        return self.name.replace("g", " g") if GROUPED.fullmatch(self.name) else self.name


def parse_form(name: str, wide: str) -> Form:
    """Return a form: fp32, bf16, fp16, int8, fp8, int4gN, or `stored`.
    `wide` is the 16-bit float of the device, or the model's.

    Raises UsageError for anything else.
    """
    if name == STORED:
        return Form(name, None, wide, wide)
    if name in FLOATS:
        return Form(name, FLOATS[name], name, name)
    if name in ("int8", "fp8"):
        return Form(name, 8, name, wide)
    if (match := GROUPED.fullmatch(name)) and int(match[1]) >= 8:
        return Form(name, 4 + BESIDE_GROUP / int(match[1]), wide, wide)
    known = ", ".join((*FLOATS, "int8", "fp8", "int4gN (groups of N inputs, at least 8)", STORED))
    raise UsageError(f"'{name}' is no form of weights", where="--forms", remedy=f"Known: {known}")
