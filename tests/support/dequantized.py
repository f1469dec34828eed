"""Make the float checkpoint of a packed one, by the stage and without it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit.errors import SourceError
from optkit.model.as_floats import as_floats
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import find_companions
from optkit.stages.dequantize import Dequantize
from tests.support.predictions import predicted
from tests.support.running import run_stage


def dequantized(source: Path, target: Path, **fields: Any) -> dict[str, Tensor]:
    """Return what the stage writes, in the sizes that it predicted, and what is read without it."""
    run_stage(Dequantize(**fields), source, target)
    predicted(Dequantize(**fields), source, target)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    if not fields:
        assert_read_alike(source, Checkpoint(target))
    return load_file(target / "model.safetensors")


def assert_read_alike(source: Path, written: Checkpoint) -> None:
    """The packed checkpoint, read as floats, is the one that was written, whatever unpacks it."""
    if torch.cuda.is_available():
        with as_floats(source, device="cuda") as place:
            unpacked = Checkpoint(place)
            assert all(torch.equal(unpacked.read(name), written.read(name)) for name in written.tensors)
    with as_floats(source) as place:
        floats = Checkpoint(place)
        assert [*floats.tensors.items()] == [*written.tensors.items()]
        assert (floats.config, sorted(find_companions(place).kept)) == (
            written.config,
            sorted(find_companions(written.directory).kept),
        )
        for name, info in written.tensors.items():
            assert torch.equal(floats.read(name), written.read(name))
            if len(info.shape) == 3:
                assert torch.equal(floats.read_member(name, 1), written.read_member(name, 1))
        shutil.copytree(place, source.parent / "elsewhere")
    with pytest.raises(SourceError, match="there are no weights"):  # a model cannot lead to files beside it
        Checkpoint(source.parent / "elsewhere")
    shutil.rmtree(source.parent / "elsewhere")
