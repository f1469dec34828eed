"""Changes to the files of an ONNX directory, in place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def change_graph(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the graph; its external data stays as it is."""
    import onnx

    model = onnx.load(directory / "model.onnx", load_external_data=False)
    change(model)
    (directory / "model.onnx").write_bytes(model.SerializeToString())


def overwrite(directory: Path, name: str, value: bytes) -> None:
    """Fill an initializer with a value that is repeated."""
    from optkit.onnx.model_file import ModelFile

    tensor = ModelFile(directory).initializers[name]
    fields = {entry.key: entry.value for entry in tensor.external_data}
    with (directory / fields["location"]).open("r+b") as file:
        file.seek(int(fields["offset"]))
        file.write(value * (int(fields["length"]) // len(value)))
