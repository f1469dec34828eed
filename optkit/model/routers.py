"""Which layers are routers: they decide where tokens go, are tiny, and are best left in full precision. No torch is needed to tell."""

from __future__ import annotations

ROUTER_NAMES = frozenset({"gate", "shared_expert_gate"})


def is_router(name: str) -> bool:
    """Whether a Linear decides where tokens go: `mlp.gate`, `mlp.router`, `shared_expert_gate`, but not `experts.3.gate`."""
    *path, last = name.split(".")
    return "experts" not in path and (last in ROUTER_NAMES or "router" in (*path, last))
