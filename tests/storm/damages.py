"""What is done to the files of a model, an artifact or a store."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.storm.desk import Desk

Damage = Callable[[Path], None]


def put(name: str, data: bytes) -> Damage:
    def damage(model: Path) -> None:
        (model / name).write_bytes(data)

    return damage


def lose(pattern: str) -> Damage:
    def damage(model: Path) -> None:
        for path in model.glob(pattern):
            path.unlink()

    return damage


def set_field(field: str, value: Any, name: str = "config.json") -> Damage:
    def damage(model: Path) -> None:
        path = model / name
        said = json.loads(path.read_text(encoding="utf-8"))
        said[field] = value
        path.write_text(json.dumps(said), encoding="utf-8")

    return damage


def patch(name: str, place: int, data: bytes) -> Damage:
    def damage(model: Path) -> None:
        with (model / name).open("r+b") as file:
            file.seek(place)
            file.write(data)

    return damage


def cut(name: str, share: float) -> Damage:
    return lambda model: os.truncate(model / name, int(share * (model / name).stat().st_size))


def change_header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(model: Path) -> None:
        path = model / "model.safetensors"
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(next(entry for name, entry in header.items() if name != "__metadata__"))
        said = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(said)) + said + data[8 + length :])

    return damage


def set_metadata(value: Any) -> Damage:
    def damage(model: Path) -> None:
        path = model / "model.safetensors"
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        said = json.dumps(json.loads(data[8 : 8 + length]) | {"__metadata__": value}).encode()
        path.write_bytes(struct.pack("<Q", len(said)) + said + data[8 + length :])

    return damage


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


def pickled(canary: Path) -> Damage:
    def damage(model: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary)))

    return damage


def replaced(make: Callable[[Path], Any]) -> Damage:
    def damage(model: Path) -> None:
        (model / "config.json").unlink()
        make(model / "config.json")

    return damage


def fifo(name: str) -> Damage:
    def damage(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    return damage


def higher_ids(model: Path) -> None:
    path = model / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said["model"]["vocab"] = {token: index + 10_000 for token, index in said["model"]["vocab"].items()}
    said["added_tokens"] = [token | {"id": token["id"] + 10_000} for token in said["added_tokens"]]
    path.write_text(json.dumps(said), encoding="utf-8")


def in_store(desk: Desk, pattern: str, text: bytes | None) -> Damage:
    def damage(store: Path) -> None:
        path = desk.draw.choice(sorted(store.glob(pattern)))
        data = path.read_bytes()
        path.unlink()  # weights are links to those of an artifact
        path.write_bytes(data[: len(data) // 2] if text is None else text)

    return damage
