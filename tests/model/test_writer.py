import errno
import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from optkit.common.own_files import OWN_FILES
from optkit.errors import ResourceError, StageError
from optkit.model import writer as writer_module
from optkit.model.checkpoint import Checkpoint
from optkit.model.writer import CheckpointWriter, copy_companions, disk_space_for, write_config
from tests.support.opened import transformers_logits


def copy_model(source: Path, target: Path, shard_bytes: int) -> None:
    checkpoint = Checkpoint(source)
    with CheckpointWriter(target, shard_bytes) as writer:
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
    copy_companions(source, target)
    write_config(target, checkpoint.config)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_transformers_opens_the_copy(tiny_model, tmp_path: Path, shard_bytes: int) -> None:
    source = tiny_model("llama")
    copy_model(source, tmp_path, shard_bytes)
    tokens = AutoTokenizer.from_pretrained(tmp_path)("def add(left, right):", return_tensors="pt").input_ids
    want = transformers_logits(source, tokens)
    assert torch.equal(transformers_logits(tmp_path, tokens), want)


def test_one_shard_has_the_plain_name_and_the_format(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.add("a", torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_at_most_a_shard_waits_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []

    def save(path: Path, *_: object) -> None:
        time.sleep(0.05)
        waiting.append(writer._pending_bytes)
        path.touch()

    monkeypatch.setattr(writer_module, "save_tensors", save)
    with CheckpointWriter(tmp_path, shard_bytes=4000, beside=True) as writer:
        for index in range(40):
            writer.add(str(index), torch.zeros(100))
    assert len(waiting) == 4
    assert max(waiting) <= 4000


@pytest.mark.parametrize("beside", [False, True])
def test_shards_stay_under_the_limit_and_the_index_names_them(tmp_path: Path, beside: bool) -> None:
    tensors = {f"t{index}": torch.full((100,), float(index)) for index in range(7)} | {"large": torch.zeros(1000)}
    with CheckpointWriter(tmp_path, shard_bytes=1000, beside=beside) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 7 * 400 + 4000}
    assert sorted(set(index["weight_map"].values())) == [
        f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)
    ]
    for name, file in index["weight_map"].items():
        held = load_file(tmp_path / file)
        assert torch.equal(held[name], tensors[name])
        assert sum(tensor.nbytes for tensor in held.values()) <= 1000 or list(held) == ["large"]
    assert not list(tmp_path.glob(".*"))


def test_full_shards_are_on_disk_before_the_end(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, shard_bytes=1000)
    for index in range(5):
        writer.add(f"t{index}", torch.zeros(100))
    assert len(list(tmp_path.glob(".shard-*.partial"))) == 2
    writer.finish()


def test_views_are_written_alone_and_contiguous(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    with CheckpointWriter(tmp_path) as writer:
        writer.add("transposed", whole.T)
        writer.add("row", whole[1])
        writer.add("scalar", torch.tensor(2.0))
        writer.add("empty", torch.zeros(0, 4))
        writer.add("parameter", torch.nn.Parameter(whole[:, :2]))
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["transposed"], whole.T)
    assert torch.equal(read["row"], whole[1])
    assert torch.equal(read["parameter"], whole[:, :2])
    assert read["scalar"].shape == ()
    assert read["empty"].shape == (0, 4)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, shard_bytes=8)
    writer.add("a", torch.ones(2))
    writer.add("b", torch.ones(2))
    with pytest.raises(StageError, match="a: the tensor is written twice"):
        writer.add("a", torch.ones(2))


def test_shared_memory_is_refused(tmp_path: Path) -> None:
    writer, tensor = CheckpointWriter(tmp_path), torch.ones(2)
    writer.add("embedding", tensor)
    with pytest.raises(StageError, match=r"lm_head: the tensor shares its memory with embedding\. Tied weights"):
        writer.add("lm_head", tensor)


def test_nothing_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no tensor was written"):
        CheckpointWriter(tmp_path).finish()


@pytest.mark.parametrize("beside", [False, True])
def test_an_error_leaves_no_shards(tmp_path: Path, beside: bool) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(KeyError), CheckpointWriter(tmp_path, shard_bytes=8, beside=beside) as writer:
        writer.add("a", torch.ones(2))
        writer.add("b", torch.ones(2))
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_says_how_much_was_needed(tmp_path: Path, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(*arguments: object, **keywords: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    writer = CheckpointWriter(tmp_path, beside=beside)
    writer.add("a", torch.ones(1000))
    with pytest.raises(
        ResourceError,
        match=r"\.shard-00001\.partial: the disk is full: 4,000 bytes were to be written and [\d,]+ are free",
    ):
        writer.finish()


def test_a_last_shard_that_cannot_be_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError), CheckpointWriter(tmp_path, shard_bytes=8, beside=True) as writer:
        writer.add("a", torch.ones(2))
        writer.add("b", torch.ones(2))
        writer._settle()
        monkeypatch.setattr("optkit.model.writer.save_tensors", Mock(side_effect=PermissionError))
    assert not list(tmp_path.iterdir())


def test_other_failures_to_save_are_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(*arguments: object, **keywords: object) -> None:
        raise SafetensorError("something else")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    writer = CheckpointWriter(tmp_path)
    writer.add("a", torch.ones(1000))
    with pytest.raises(SafetensorError, match="something else"):
        writer.finish()


def test_a_full_disk_while_companions_are_copied(tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copyfile(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module.shutil, "copyfile", copyfile)
    with pytest.raises(ResourceError, match="the disk is full"):
        copy_companions(tiny_model("llama"), tmp_path)


def test_other_system_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_space_for(tmp_path / "absent" / "file", 1):
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("trusted", [True, False])
def test_companions_are_of_stated_kinds(trusted: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    kept = [
        "LICENSE",
        "README.md",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "1_Pooling/config.json",
    ]
    kept += ["modeling_custom.py"] * trusted
    if not trusted:
        (source / "x").mkdir(parents=True)
        (source / "x" / "modeling.py").write_text("code")
    left = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ]
    left += [
        *OWN_FILES,
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "model.gguf",
        "onnx/model.onnx",
        ".git/HEAD",
        ".cache/huggingface/x",
    ]
    left += [".env", ".hidden/tokenizer.json", "notes.txt", "credentials.json", "id_rsa"]
    for name in [*kept, *left]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    copy_companions(source, target, trusted)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == sorted(kept)
    assert (target / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"


def test_the_config_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("old")
    write_config(tmp_path, {"model_type": "llama", "name": "é"})
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"model_type": "llama", "name": "é"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
