"""The bytes of tensors straight from safetensors files, without torch.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from optkit.model.checkpoint import Checkpoint


class TensorBytes:
    """Reads tensors of a checkpoint; each file's header is parsed once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def read(self, name: str) -> bytes:
        """Return the bytes of a tensor as they lie in the file, little-endian and row by row."""
        path = self.checkpoint.files[name]
        with path.open("rb") as file:
            if path not in self._headers:
                (length,) = struct.unpack("<Q", file.read(8))
                self._headers[path] = 8 + length, json.loads(file.read(length))
            data, header = self._headers[path]
            start, end = header[name]["data_offsets"]
            file.seek(data + start)
            return file.read(end - start)
