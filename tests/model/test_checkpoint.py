import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.errors import SourceError
from optkit.model import safetensors_file
from optkit.model.checkpoint import INDEX, TORCH_NAMES, Checkpoint, all_finite
from optkit.model.safetensors_file import _read


def rewrite(model: Path, **changed: torch.Tensor) -> None:
    save_file(load_file(model / "model.safetensors") | changed, model / "model.safetensors", metadata={"format": "pt"})


def test_reads_what_safetensors_reads(model: Path) -> None:
    checkpoint, reference = Checkpoint(model), load_file(model / "model.safetensors")
    assert set(checkpoint.tensors) == set(reference)
    for name, tensor in reference.items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert checkpoint.tensors[name].size_bytes == tensor.nbytes
        assert torch.equal(checkpoint.read_finite(name), tensor)


def test_reads_every_dtype_empty_and_large_ones_too(model: Path) -> None:
    torch.manual_seed(0)
    dtypes = [getattr(torch, name) for kind, name in TORCH_NAMES.items() if kind not in ("F4", "F8_E8M0", "BOOL")]
    made = {str(dtype): (torch.randn(7, 5) * 9).abs().to(dtype) for dtype in dtypes}
    made |= {
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "large": torch.randn(513, 1024),
        "bool": torch.eye(3) > 0,
    }
    rewrite(model, **made)
    checkpoint = Checkpoint(model)
    for name, tensor in made.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else read == tensor
        assert checkpoint.read_bytes(name) == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    checkpoint.read("large").zero_()
    assert torch.equal(checkpoint.read("large"), made["large"])


def test_what_was_read_needs_no_file_any_more(model: Path) -> None:
    """A mapping would hold the file open, one of 1,024 that a process may have, and die of what comes next."""
    large = torch.randn(513, 1024)
    rewrite(model, large=large)
    checkpoint, opened = Checkpoint(model), len(list(Path("/proc/self/fd").iterdir()))
    read = [checkpoint.read("large") for _ in range(3)]
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    (model / "model.safetensors").write_bytes(b"")
    assert all(torch.equal(each, large) for each in read)


@pytest.mark.parametrize("change", ["cut off", "as long", "longer"])
def test_a_file_that_is_changed_later(model: Path, change: str) -> None:
    checkpoint, file = Checkpoint(model), model / "model.safetensors"
    if change == "cut off":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 1)
    else:
        tensors = load_file(file) | ({"more": torch.zeros(9)} if change == "longer" else {})
        save_file(tensors, file)
        os.utime(file, ns=(0, 0))  # a clock may be too coarse to tell
    last = max(checkpoint.tensors, key=lambda name: checkpoint._begins[name])
    with pytest.raises(SourceError) as error:
        checkpoint.read(last)
    assert str(error.value) == (
        f"{file}: the file was changed while it was in use. Its header was read before, and says where the "
        "tensors of the earlier file lie. See that the file is whole, and run it again."
    )


def test_a_header_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(safetensors_file, "_read", lambda header: (read.append(header), _read(header))[1])
    first, again = Checkpoint(model), Checkpoint(model)
    assert first.tensors == again.tensors
    assert len(read) == 1
    rewrite(model, more=torch.zeros(9))
    assert Checkpoint(model).tensors["more"].shape == (9,)


def test_sizes_of_blocks_and_of_what_is_outside(model: Path) -> None:
    shape = Checkpoint(model).shape
    tensors = load_file(model / "model.safetensors")
    block = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("model.layers.1."))
    assert shape.block_bytes == block
    assert shape.outside_bytes == sum(tensor.nbytes for tensor in tensors.values()) - 3 * block


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such directory"):
        Checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").unlink(), r"there is no config\.json"),
        (lambda model: (model / "model.safetensors").unlink(), "there are no weights"),
        (
            lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
            r"the weights are pickles \(pytorch_model\.bin\)",
        ),
        (lambda model: (model / INDEX).write_text("{}"), "is not an index"),
        (
            lambda model: (model / "model.safetensors").write_bytes(b"\4" + bytes(7) + b"abcd" + bytes(100)),
            "the header is not safetensors",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(model: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(model)
    with pytest.raises(SourceError, match=message):
        Checkpoint(model)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[]", "is not a JSON object")])
def test_broken_config(model: Path, text: str, message: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(SourceError, match=message):
        _ = Checkpoint(model).config


@pytest.mark.parametrize("keep", [-100, 2000, 5])
def test_truncated_file(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"header asks for|not a whole safetensors file"):
        Checkpoint(model)


def test_missing_shard_is_named(model: Path) -> None:
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(2)}, model / "model-00001-of-00002.safetensors")
    with pytest.raises(SourceError, match="1 of 2 shards are missing: model-00002-of-00002"):
        Checkpoint(model)


def sharded(model: Path, shards: int) -> dict[str, str]:
    """Take the model apart into shards, and return the map of its index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for index in range(shards):
        name, names = f"model-{index + 1:05d}-of-{shards:05d}.safetensors", list(tensors)[index::shards]
        save_file({each: tensors[each] for each in names}, model / name)
        places |= dict.fromkeys(names, name)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_a_shard_of_no_bytes_is_named(model: Path) -> None:
    sharded(model, 3)
    (model / "model-00002-of-00003.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors: not a whole safetensors file \(0 bytes"):
        Checkpoint(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places, first: places | {"x.weight": first}, "x.weight is not in model-00001-of-00002.safetensors"),
        (
            lambda places, first: {name: file for name, file in places.items() if name != "model.norm.weight"},
            "model.norm.weight in model-00001-of-00002.safetensors is not in model.safetensors.index.json",
        ),
        (
            lambda places, first: {name: file for name, file in places.items() if file == first},
            "no tensor of model-00002-of-00002.safetensors is in model.safetensors.index.json",
        ),
    ],
)
def test_index_and_shards_that_disagree(model: Path, change: Any, message: str) -> None:
    places = sharded(model, 2)
    changed = change(places, places["model.norm.weight"])
    (model / INDEX).write_text(json.dumps({"weight_map": changed}))
    with pytest.raises(SourceError, match=re.escape(f"{INDEX} and the shards disagree: {message}")):
        Checkpoint(model)


def test_a_tensor_in_two_shards(model: Path) -> None:
    first, second = sorted(set(sharded(model, 2).values()))
    tensors = load_file(model / second)
    save_file(tensors | {"model.norm.weight": torch.zeros(64)}, model / second)
    with pytest.raises(
        SourceError,
        match=re.escape(f"{INDEX} and the shards disagree: model.norm.weight is in {first} and in {second}"),
    ):
        Checkpoint(model)


def test_files_of_weights_that_nothing_reads_are_known(model: Path) -> None:
    save_file({"head": torch.zeros(2)}, model / "value_head.safetensors")
    assert Checkpoint(model).unnamed == ("value_head.safetensors",)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_counted_and_named(model: Path, value: float) -> None:
    weight = torch.zeros(64)
    weight[3] = value
    rewrite(model, **{"model.norm.weight": weight})
    with pytest.raises(SourceError, match=r"model\.norm\.weight: 1 of 64 weights are NaN or Inf"):
        Checkpoint(model).read_finite("model.norm.weight")


def test_unknown_tensor(model: Path) -> None:
    with pytest.raises(SourceError, match="there is no tensor absent"):
        Checkpoint(model).read("absent")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_or_not_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5).to(dtype)
    assert all_finite(tensor)
    assert all_finite(tensor[:0])
    assert all_finite(torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype))
    for value in (float("nan"), float("inf"), float("-inf")):
        spoiled = tensor.clone()
        spoiled[3, 2] = value
        assert not all_finite(spoiled)
