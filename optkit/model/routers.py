"""Which layers are routers, which decide where tokens go and are best left in full precision.

No torch is needed to tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from optkit.model.shape import ModelShape
from optkit.model.text_config import text_config

GATES = frozenset({"gate", "shared_expert_gate"})


def routers_of(shape: ModelShape) -> frozenset[str]:
    """Return the matrices of the decoder blocks that decide where tokens go, by use and by name.

    By what they do: they stand beside experts and have an output for each (Hunyuan's
    `mlp.gate.wg`), and are no projection of an expert that sees all tokens. By name: a router may
    make several choices, or none of experts (Gemma 3n's `altup.modality_router`);
    `experts.3.gate` is none.
    """
    matrices = {
        name.removesuffix(".weight"): info.shape for name, info in shape.tensors.items() if name.endswith(".weight")
    }
    beside = set(experts_of(shape))
    return frozenset(
        name
        for name, sizes in matrices.items()
        if len(sizes) == 2
        and shape.block(f"{name}.weight")
        and (
            _is_called_router(name)
            or any(
                sizes[0] == count
                and name.startswith(f"{holder}.")
                and not name.startswith(f"{experts}.")
                and not name.endswith("_proj")
                for holder, experts, count in beside
            )
        )
    )


def _is_called_router(name: str) -> bool:
    path = name.split(".")
    return any("router" in part for part in path) or ("experts" not in path and not GATES.isdisjoint(path))


def experts_of(shape: ModelShape) -> Iterator[tuple[str, str, int]]:
    """Yield the module that holds experts, the experts, and how many these are.
    They are modules in a list, or one tensor for all of them.
    """
    lists: dict[tuple[str, str], set[int]] = {}
    config = text_config(shape.config)
    told = {value for key, value in config.items() if "expert" in key and type(value) is int and value > 1}
    for name, info in shape.tensors.items():
        if not (place := shape.block(name)):
            continue
        block = f"{place[0]}.{place[1]}"
        if found := re.match(r"(.+?)\.([^.]+)\.(\d+)\.", name.removeprefix(f"{block}.")):
            holder = f"{block}.{found[1]}"
            lists.setdefault((holder, f"{holder}.{found[2]}"), set()).add(int(found[3]))
        elif len(info.shape) == 3 and info.shape[0] in told:
            experts = name.rpartition(".")[0]
            if (holder := experts.rpartition(".")[0]) != block:
                yield holder, experts, info.shape[0]
    yield from ((holder, experts, len(indices)) for (holder, experts), indices in lists.items() if len(indices) > 1)
