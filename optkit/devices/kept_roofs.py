"""The measured roof of a device and its file, once per device, driver and version of torch."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from optkit.common.atomic import write_text_atomically
from optkit.common.cache import default_store
from optkit.common.frozen import Frozen, digest
from optkit.common.out_of_resources import memory_errors
from optkit.devices.datasheets import Device
from optkit.devices.roof import Roof
from optkit.environment import cpu_threads, device_name, driver_version, memory, package_version
from optkit.errors import UsageError
from optkit.progress import Progress, SilentProgress

VERSION = 3
"""Raised when the same device begins to be measured differently."""


class KeptRoof(Frozen):
    """A roof with what it was measured on."""

    circumstances: dict[str, str | int | None]
    created: str
    roof: Roof
    generation: int = 0
    """How often it was measured again: shares of another roof are other numbers."""


def measured_device(device: str, progress: Progress | None = None, again: bool = False) -> tuple[Device, Roof]:
    """Return the roof of a device here (`cpu`, `cuda:1`), kept from before or measured now.
    `again` measures whatever is kept.

    Raises UsageError for a GPU that torch does not see, ResourceError without memory.
    """
    import torch

    count = torch.cuda.device_count()
    if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
        remedy = "Use cpu, or the name of a device that is not here, e.g. h200"
        raise UsageError(f"torch sees {count} GPUs here", where=f"device {device}", remedy=remedy)
    circumstances = _circumstances(device, torch.get_num_threads())
    kept = None if again else _kept(circumstances)
    if kept is None:
        from optkit.devices.measured import measure_roof

        what, remedy = "memory ran out while the device was measured", "Close what else uses it"
        with memory_errors(lambda _: what, device, remedy):
            roof = measure_roof(device, progress or SilentProgress())
        earlier = _kept(circumstances)
        kept = KeptRoof(
            circumstances=circumstances,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            roof=roof,
            generation=earlier.generation + 1 if earlier else 0,
        )
        write_text_atomically(_place(circumstances), kept.model_dump_json(indent=1))
    return _device(device, kept), kept.roof


def kept_device(device: str) -> Device | None:
    """Return the roof of a device as measured before; None if it was not, under these conditions."""
    import torch

    kept = _kept(_circumstances(device, torch.get_num_threads()))
    return _device(device, kept) if kept else None


def roof_generation(device: str) -> int:
    """Return how often the roof of a device that is here was measured again, without torch.
    It is 0 before the first measurement.
    """
    kept = _kept(_circumstances(device, cpu_threads()))
    return kept.generation if kept else 0


def _place(circumstances: dict[str, str | int | None]) -> Path:
    return default_store() / "roofs" / f"{digest(circumstances)}.json"


def _circumstances(device: str, threads: int) -> dict[str, str | int | None]:
    """Return what decides the numbers."""
    found: dict[str, str | int | None] = {
        "version": VERSION,
        "device_name": device_name(device),
        "torch": package_version("torch"),
    }
    return found | ({"threads": threads} if device == "cpu" else {"driver": driver_version()})


def _kept(circumstances: dict[str, str | int | None]) -> KeptRoof | None:
    """Return what is kept; a file that was damaged is measured anew."""
    try:
        return KeptRoof.model_validate_json(_place(circumstances).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def _device(device: str, kept: KeptRoof) -> Device:
    roof = kept.roof
    threads = kept.circumstances.get("threads")
    return Device(
        name=f"{kept.circumstances['device_name']}{f', {threads} threads' if threads else ''}",
        bandwidth=max(roof.reading.value, roof.copying.value),
        rates={name: rate.value for name, rate in roof.products.items()},
        memory_bytes=memory(device).total_bytes,
        source=f"measured here with torch {kept.circumstances['torch']}, {kept.created}",
    )
