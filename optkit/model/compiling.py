"""What torch's compiler is told before it compiles a model, and whether it gave up."""

from __future__ import annotations

import sys
import warnings

RECOMPILE_LIMIT = 64
"""Shapes of requests (batch, length of the cache) that are compiled before torch stops compiling."""
WAITING = "transformers::grouped_mm_fallback"
"""Products of experts that are compiled in another dtype than bfloat16: Python waits for the GPU in them, which no
CUDA graph can.
"""
GIVEN_UP = "Dynamo recompile limit exceeded"
"""How torch's counter of what it does not compile names too many shapes."""


def silence_advice() -> None:
    """Keep torch's compiler from telling the user of optkit to allow TensorFloat32.
    That would change what is measured.
    """
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning, r"torch\._inductor\.compile_fx")


def allow_many_shapes() -> None:
    """Let torch compile a function for `RECOMPILE_LIMIT` shapes; its own limit is 8."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)


def keep_waiting_out_of_graphs() -> None:
    """Let torch's compiler end a CUDA graph in front of products that wait, and begin another one behind them.
    torch before 2.10 cannot.
    """
    import torch._inductor.config as inductor

    if WAITING not in getattr(inductor, "custom_should_partition_ops", [WAITING]):
        inductor.custom_should_partition_ops.append(WAITING)


def times_given_up() -> int:
    """Return how often in this process torch ran a function uncompiled.
    It had been compiled for too many shapes.
    """
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return sum(count for reason, count in counters["unimplemented"].items() if reason.startswith(GIVEN_UP))
