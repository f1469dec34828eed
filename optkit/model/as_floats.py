"""Let stages read a packed checkpoint as floats.

`as_floats` makes a directory with all files of the float checkpoint but its weights, and
`optkit.model.checkpoint.Checkpoint` opens it like any other. No float checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

from optkit.common.held_files import held_directory
from optkit.errors import OptkitError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.cost import Cost
from optkit.model.packed_floats import float_dtype, float_shape, forget_packing, notes_on_floats, unpacking_bytes
from optkit.model.read_weights import Read, reads_of
from optkit.model.safetensors_file import SHARD_BYTES
from optkit.model.shape import ModelShape
from optkit.model.unpacked import PLACE, PREFIX
from optkit.model.writer import copy_companions, write_json


@contextmanager
def as_floats(packed: Path, trusted: bool = False, device: str = "cpu") -> Iterator[Path]:
    """Give a directory that `Checkpoint` opens as the float checkpoint of a packed one, which the
    device unpacks. Raises what `packed_floats` raises. Errors within it name the packed one.
    """
    shape = Checkpoint(packed).shape
    with held_directory(Path(gettempdir()), PREFIX) as home:
        place = home / f"{PREFIX}weights"
        place.mkdir()
        copy_companions(packed, place, trusted, float_shape(shape).config)
        forget_packing(place)
        write_json(place / PLACE, {"directory": str(packed.absolute()), "device": device})
        try:
            yield place
        except OptkitError as error:  # the place will be gone when it is read
            parts = (error.what, error.where, error.why, error.remedy)
            what, where, why, remedy = (part.replace(str(place), str(packed)) for part in parts)
            OptkitError.__init__(error, what, where=where, why=why, remedy=remedy)
            raise


def unpacking(cost: Cost, packed: ModelShape, left: ModelShape, device: str) -> Cost:
    """Return what a step needs that reads packed weights as floats, and leaves `left`. A weight is unpacked
    before anything is done with it, while a shard waits to be written. Raises as `refuse_left_apart` does.
    """
    refuse_left_apart(left)
    ram, gpu = unpacking_bytes(packed, device)
    most = {"ram_bytes": max(cost.ram_bytes, min(left.size_bytes, SHARD_BYTES) + ram)}
    most["gpu_bytes"] = max(cost.gpu_bytes, gpu)
    return cost.model_copy(update=most).noting(notes(packed))


def refuse_left_apart(left: ModelShape) -> None:
    """Raise StageError for a float model whose experts lie one by one, where transformers reads them joined."""
    apart = next((name for name in left.tensors if ".experts.0." in name), "")
    if apart and not left.quant_method and Read.REPLACED in reads_of(left.config)(""):
        raise StageError(
            "its float weights would lie expert by expert",
            where=apart,
            why=f"Packed ones do, and transformers reads those of a float {left.config.get('model_type')} joined",
            remedy="Start from the model's own float weights",
        )


def notes(packed: ModelShape) -> tuple[str, ...]:
    """Return what a step says that reads packed weights as floats."""
    return notes_on_floats(packed, f"are read as {float_dtype(packed)}, tensor by tensor")
