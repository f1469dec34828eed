"""Which kernel computes a kind of layer on this machine: decided once, then kept in the cache.

Another kernel rounds otherwise. So every process has to take the same one, however busy the machine
is when it starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from optkit.common.atomic import remember_first
from optkit.common.cache import cache_directory
from optkit.common.frozen import digest
from optkit.environment import cpu_name, package_version

VERSION = 1
"""Raised when kernels get faster or slower, so that machines choose anew."""

_known: dict[Path, int] = {}


def kept_choice(layer: Mapping[str, object], kernels: Sequence[str], device: str, choose: Callable[[], int]) -> int:
    """Return which of the kernels computes such a layer on the device.

    `layer` says all that decides how fast they are, `kernels` names them. `choose` is called by the
    first process that needs the choice, and decides for all.
    """
    on_gpu = torch.device(device).type == "cuda"
    circumstances = {
        "version": VERSION,
        "torch": package_version("torch"),
        "architecture": os.environ.get("OPTKIT_CPU_ARCH", "native"),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "layer": {name: str(value) for name, value in layer.items()},
        "kernels": list(kernels),
    }
    place = cache_directory() / "kernel_choices" / f"{digest(circumstances)}.json"
    if place not in _known:
        kept = _kept(place, len(kernels))
        if kept is None:
            memory = json.dumps({**circumstances, "chosen": choose()}, indent=1)
            kept = int(json.loads(remember_first(place, memory))["chosen"])
        _known[place] = kept
    return _known[place]


def _kept(place: Path, count: int) -> int | None:
    """Return the choice in a file, None without one; what was damaged is deleted."""
    try:
        chosen = json.loads(place.read_text(encoding="utf-8"))["chosen"]
        return range(count).index(chosen)
    except (ValueError, TypeError, KeyError):
        place.unlink(missing_ok=True)
    except OSError:
        pass
    return None
