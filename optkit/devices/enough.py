"""Whether there are as many devices as a stage asks for; without torch."""

from __future__ import annotations

from optkit.environment import cpu_cores, visible_gpus
from optkit.errors import StageError


def refuse_devices(devices: int, device: str, where: str) -> None:
    """Raise StageError for more devices than there are."""
    if devices == 1:
        return
    there = cpu_cores() if device == "cpu" else visible_gpus()
    if devices > there:
        raise StageError(
            f"{devices} devices are asked for, and there {'is' if there == 1 else 'are'} {there}",
            where=where,
            why="Each process takes a core of the CPU at least"
            if device == "cpu"
            else "Each process takes a GPU of its own",
            remedy=f"Set `devices` to at most {there}",
        )
    if ":" in device:
        what = f"{devices} devices are asked for, and {device} is one"
        raise StageError(what, where=where, remedy="Say `--device cuda`")
