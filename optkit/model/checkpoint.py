"""A model directory: config.json and safetensors, checked before a single weight is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.common.files import check_kinds, open_file
from optkit.common.grouping import some
from optkit.errors import SourceError
from optkit.model import main_memory
from optkit.model.companions import require_inside
from optkit.model.config_file import read_config
from optkit.model.formats.base import Format
from optkit.model.main_memory import own_bytes
from optkit.model.packed_floats import left_out
from optkit.model.safetensors_file import Stamp, read_index, read_places
from optkit.model.shape import DTYPE_BITS, FLOAT_NAMES, ModelShape, TensorInfo
from optkit.model.unpacked import Unpacked, packed_place

if TYPE_CHECKING:
    from torch import Tensor

SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
"""What shards are called, those that the index names and those that it lacks."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OF_ADAPTER = "adapter_config.json"
ANEW = "See that the file is whole, and run it again"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2", "C64": "complex64",
    "I64": "int64", "U64": "uint64", "I32": "int32", "U32": "uint32", "I16": "int16", "U16": "uint16", "I8": "int8",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Torch's dtypes by the names that safetensors uses; of F4 one element holds two."""


def all_finite(tensor: Tensor) -> bool:
    """Whether a float tensor of 16 bits or more has no NaN or Inf; makes no temporary tensor."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


class Checkpoint:
    """A model directory. Headers are read at once, weights only when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise SourceError("no such directory", where=str(directory))
        check_kinds(self.directory)
        if not (found := Format.of(self.directory)).is_checkpoint:
            raise SourceError(
                f"the weights are in {found.label}",
                where=str(directory),
                why="What was asked for works on a checkpoint of safetensors",
                remedy=f"Name {found.origin}",
            )
        if (self.directory / OF_ADAPTER).is_file():
            raise SourceError(
                f"an adapter lies in it ({OF_ADAPTER})",
                where=str(directory),
                why="transformers adds it to the model, and other programs do not",
                remedy="Merge it into the float weights by peft's merge_and_unload, or name a directory without it",
            )
        if not (self.directory / "config.json").is_file():
            why, remedy = "A model directory needs one", "Download the model whole, or name its directory"
            raise SourceError("there is no config.json", where=str(directory), why=why, remedy=remedy)
        require_inside(self.directory, "config.json")
        self.files: dict[str, Path] = {}
        """Tensor name -> the file that holds it."""
        self.tensors: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        """The byte of its file that a tensor begins at: to open files of many tensors again takes longer
        than to read one."""
        self._stamps: dict[Path, Stamp] = {}
        self.unnamed: tuple[str, ...] = ()
        """Files of weights beside those that the index names; nothing reads them."""
        self.left_out: Mapping[str, str] = {}
        """Tensors of a packed checkpoint that have no place beside its floats -> the reason."""
        self._unpacked: Unpacked | None = None
        if place := packed_place(self.directory):
            packed, device = place
            whole = Checkpoint(packed)
            self._unpacked, self.unnamed, self.left_out = Unpacked(whole, device), whole.unnamed, left_out(whole.shape)
            self.files, self.tensors = self._unpacked.files, self._unpacked.tensors
            return
        index = self.directory / INDEX
        listed = read_index(index) if index.is_file() else {}
        shards = sorted(set(listed.values()))
        files = dict(zip(shards, self._shards(shards), strict=True)) if listed else {SINGLE: self._single_file()}
        beside = {path.name for path in self.directory.glob("*.safetensors")} - files.keys()
        self.unnamed = tuple(sorted(beside))
        if SINGLE in beside:
            raise SourceError(
                f"{SINGLE} and {INDEX} are both there",
                where=str(directory),
                why="transformers reads the first, and other programs the shards that the second names",
                remedy="Remove the one that is not the model's",
            )
        lying: dict[str, list[str]] = {}
        for shard, path in files.items():
            places, self._stamps[path] = read_places(path)
            for name, (info, begin) in places.items():
                lying.setdefault(name, []).append(shard)
                self.files[name], self.tensors[name], self._begins[name] = path, info, begin
        if listed:
            self._refuse_other_index(listed, lying)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        return read_config(self.directory / "config.json")

    @property
    def dtype(self) -> str:
        """Torch's name of the float dtype that config.json names, else of the first float tensor."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        stored = (FLOAT_NAMES[info.dtype] for info in self.tensors.values() if info.dtype in FLOAT_NAMES)
        return str(named) if named in FLOAT_NAMES.values() else next(stored, "float32")

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The `quantization_config`, None for a float checkpoint."""
        return self.config.get("quantization_config")

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape(config=self.config, tensors=self.tensors)

    def read(self, name: str, pinned: bool = False) -> Tensor:
        """Return one tensor, on the CPU, in the dtype that the file has it in. `pinned`: in memory from
        which a GPU copies by itself, if it is stored so. Raises SourceError for an unknown name, and for
        a file that was changed meanwhile.
        """
        if name not in self.files:
            raise SourceError(f"there is no tensor {name}", where=str(self.directory))
        return self._unpacked.read(name) if self._unpacked else self._read(name, self.tensors[name], pinned=pinned)

    def read_member(self, name: str, index: int) -> Tensor:
        """Return one of the tensors that are stacked in a stored one, and read no other; else as `read`."""
        if self._unpacked:
            return self._unpacked.read_member(name, index)
        whole = self.tensors[name]
        return self._read(name, TensorInfo(whole.dtype, whole.shape[1:]), index)

    def read_bytes(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a tensor, or the first ones, as they lie in the file, little-endian and row by row;
        without torch. Raises SourceError for a file that was changed meanwhile.
        """
        size = self.tensors[name].size_bytes
        return bytes(self._data(name, size if most is None else min(size, most)))

    def _read(self, name: str, info: TensorInfo, index: int = 0, pinned: bool = False) -> Tensor:
        """Return the tensor of a header, or the one that begins so many of its sizes behind it."""
        import torch

        *rows, last = info.shape or (1,)
        sizes = (*rows, last // 2) if info.dtype == "F4" else info.shape
        dtype = getattr(torch, TORCH_NAMES[info.dtype])
        if not info.size_bytes:
            return torch.empty(sizes, dtype=dtype)
        place = main_memory.pinned(info.size_bytes) if pinned and info.size_bytes <= main_memory.MOST_PINNED else None
        data = self._data(name, info.size_bytes, index * info.size_bytes, place)
        return (torch.frombuffer(data, dtype=torch.uint8) if place is None else place).view(dtype).view(sizes)

    def _data(self, name: str, size: int, skipped: int = 0, place: Tensor | None = None) -> Any:
        """Return bytes of a tensor: in a place, uint8 [size], or a copy of its own. The file is not mapped: each
        mapping would hold it open, and whoever cuts the file off would end the process.
        """
        data: Any = place.numpy().data if place is not None else own_bytes(size)
        path = self.files[name]
        with open_file(path) as file:
            file.seek(self._begins[name] + skipped)
            file.readinto(data)
            if Stamp.of(file.fileno()) != self._stamps[path]:
                why = "Its header was read before, and says where the tensors of the earlier file lie"
                raise SourceError("the file was changed while it was in use", where=str(path), why=why, remedy=ANEW)
        return data

    def read_finite(self, name: str, member: int | None = None, pinned: bool = False) -> Tensor:
        """Return one tensor, or one of those stacked in it; raises SourceError if it holds NaN or Inf."""
        tensor = self.read(name, pinned) if member is None else self.read_member(name, member)
        if tensor.is_floating_point() and DTYPE_BITS[self.tensors[name].dtype] >= 16 and not all_finite(tensor):
            bad = int((~tensor.isfinite()).sum())
            raise SourceError(
                f"{bad:,} of {tensor.numel():,} weights are NaN or Inf",
                where=f"{self.files[name]}: {name}",
                why="Nothing computed from them would mean anything",
                remedy="Take the checkpoint from its source again",
            )
        return tensor

    def _shards(self, names: list[str]) -> list[Path]:
        files = [require_inside(self.directory, name, INDEX) for name in names]
        missing = [name for name in names if not (self.directory / name).is_file()]
        if missing:
            raise SourceError(
                f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}",
                where=str(self.directory),
                why=f"{INDEX} names them",
                remedy="Copy or download them again",
            )
        return files

    def _refuse_other_index(self, listed: Mapping[str, str], found: Mapping[str, list[str]]) -> None:
        """Raise SourceError unless index and shards name the same tensors, each once, and no shard is left over."""
        wrong = [f"{name} is not in {file}" for name, file in listed.items() if file not in found.get(name, ())]
        wrong += [f"{name} in {files[0]} is not in {INDEX}" for name, files in found.items() if name not in listed]
        # transformers takes the last one, whatever the index says
        wrong += [f"{name} is in {' and in '.join(files)}" for name, files in found.items() if len(files) > 1]
        wrong += [f"no tensor of {name} is in {INDEX}" for name in self.unnamed if SHARD.fullmatch(name)]
        if wrong:
            raise SourceError(
                f"{INDEX} and the shards disagree: {some(wrong)}",
                where=str(self.directory),
                why="They are of two checkpoints, or one of them was changed",
                remedy="Copy or download the model again",
            )

    def _single_file(self) -> Path:
        if (self.directory / SINGLE).is_file():
            return require_inside(self.directory, SINGLE)
        pickles = sorted(path.name for pattern in PICKLES for path in self.directory.glob(pattern))
        if pickles:
            raise SourceError(
                f"the weights are pickles ({', '.join(pickles[:3])})",
                where=str(self.directory),
                why="A pickle can run code when it is read, so only safetensors are",
                remedy="Convert them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
            )
        why, remedy = f"Neither {SINGLE} nor {INDEX} is there", "Download the model whole, or name its directory"
        raise SourceError("there are no weights", where=str(self.directory), why=why, remedy=remedy)
