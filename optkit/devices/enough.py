"""Whether there are as many devices as a stage asks for; without torch."""

from __future__ import annotations

from optkit.environment import cpu_cores, visible_gpus
from optkit.errors import StageError


def refuse_devices(devices: int, device: str, where: str) -> None:
    """Raise StageError for more devices than there are.

    A machine without any GPU may plan for another one: what runs refuses cuda there by itself.
    """
    if devices == 1:
        return
    there = cpu_cores() if device == "cpu" else visible_gpus()
    if devices > there and (there or device == "cpu"):
        kind = "CPU core" if device == "cpu" else "GPU"
        raise StageError(
            f"{devices} devices are asked for, and there {f'is 1 {kind}' if there == 1 else f'are {there} {kind}s'}",
            where=where,
            why="Each process takes one at least" if device == "cpu" else "Each process takes one of its own",
            remedy=f"Set `devices` to at most {there}",
        )
    if ":" in device:
        what = f"{devices} devices are asked for, and {device} is one"
        raise StageError(what, where=where, remedy="Say `--device cuda`")
