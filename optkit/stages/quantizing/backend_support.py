"""What other libraries make of a stage's fields.
They honour some, with some values, and have their own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optkit.packed_tensors.gptq import GPTQ_GROUP_SIZES

WEIGHTS = frozenset({"backend", "bits", "group_size", "symmetric", "format", "include", "exclude", "overrides"})
"""Which layers, and their form: told to the worker layer by layer."""


GEMM = {"format": ("awq",), "bits": (4,), "symmetric": (False,)}
"""What AutoAWQ's layout holds."""
GPTQ_LAYOUT = {"format": ("gptq",), "symmetric": (True,), "group_size": (None, *GPTQ_GROUP_SIZES)}
"""What GPTQModel's layout holds."""
CLIPPED_AT_ONCE = 64
"""Outputs that AutoAWQ's search for clipping takes together, in gptqmodel too."""


@dataclass(frozen=True)
class Offer:
    """One library in the place of one stage."""

    library: str
    fields: frozenset[str]
    """Fields that it honours; every other one is refused."""
    passed: frozenset[str] = frozenset()
    """Those of them that the worker is told by name."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that it has, if these are fewer than the stage's."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Taken if the recipe says nothing, in place of the stage's own default."""
    needs_gpu: str = ""
    """Why it does not run on a CPU; empty if it does."""
    outputs_multiple: int = 1
    """What the outputs of every layer must be a multiple of."""


def _offer(
    library: str, without: tuple[str, ...] = (), passed: tuple[str, ...] = (), calibrated: bool = True, **more: Any
) -> Offer:
    fields = WEIGHTS - set(without) | set(passed) | ({"calibration"} if calibrated else set())
    return Offer(library, fields, frozenset(passed), **more)


OFFERS: Mapping[tuple[str, str], Offer] = {
    ("gptq", "auto_round"): _offer(
        "auto_round",
        without=("overrides",),
        passed=("batch_size", "learn", "learning_steps"),
        values={**GPTQ_LAYOUT, "learn": ("blocks",)},
        defaults={"format": "gptq", "learning_steps": 200},
    ),
    ("gptq", "gptqmodel"): _offer(
        "gptqmodel",
        passed=("damping", "activation_order", "true_sequential", "batch_size", "earlier_errors"),
        values={**GPTQ_LAYOUT, "true_sequential": (True, False)},
        defaults={"format": "gptq", "true_sequential": True, "batch_size": 1, "earlier_errors": 0.0},
    ),
    ("gptq", "llmcompressor"): _offer(
        "llmcompressor",
        passed=("damping", "activation_order", "batch_size"),
        values={"format": ("compressed-tensors",), "bits": (2, 3, 4, 8)},
        defaults={"batch_size": 1},
    ),
    ("rtn", "llmcompressor"): _offer(
        "llmcompressor", calibrated=False, values={"format": ("compressed-tensors",), "bits": (4, 8)}
    ),
    ("rtn", "torchao"): _offer(
        "torchao",
        calibrated=False,
        without=("overrides",),
        values={"format": ("compressed-tensors",), "bits": (2, 4, 8)},
    ),
    ("awq", "autoawq"): _offer(
        "autoawq",
        without=("include", "exclude", "overrides"),
        passed=("batch_size",),
        values=GEMM,
        defaults={"format": "awq"},
        outputs_multiple=CLIPPED_AT_ONCE,
    ),
    ("awq", "auto_round"): _offer(
        "auto_round",
        without=("overrides",),
        passed=("batch_size", "grid_points"),
        values=GEMM,
        defaults={"format": "awq", "grid_points": 20},
    ),
    ("awq", "gptqmodel"): _offer(
        "gptqmodel",
        without=("overrides",),
        passed=("batch_size",),
        values=GEMM,
        defaults={"format": "awq", "batch_size": 1},
        outputs_multiple=CLIPPED_AT_ONCE,
    ),
    ("awq", "llmcompressor"): _offer(
        "llmcompressor",
        passed=("batch_size", "grid_points"),
        values={"format": ("compressed-tensors",), "bits": (4, 8)},
        defaults={"batch_size": 1, "grid_points": 20},
        needs_gpu="Its AWQ pins memory for a GPU at every batch (llm-compressor 0.14, pin_memory)",
    ),
}
"""(stage, backend) -> what it has."""
