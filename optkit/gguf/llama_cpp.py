"""llama.cpp in this process: its quantizer, its tokenizer, and logits of an open model.

Bindings: https://pypi.org/project/llama-cpp-python
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit.environment import cpu_threads
from optkit.errors import ResourceError, SourceError, StageError, needing

CHUNK = 512
"""Tokens that are computed at once, whose logits llama.cpp holds."""
_said: deque[str] = deque(maxlen=100)
"""What llama.cpp logged last."""
_kept: list[Any] = []
"""What it calls to log."""


@cache
def _library() -> Any:
    """Return the binding, whose log is kept from the terminal."""
    with needing("llama-cpp-python", "llama.cpp", "optkit[llama-cpp]"):
        import llama_cpp
    llama_cpp.llama_backend_init()
    _kept.append(llama_cpp.llama_log_callback(lambda level, text, data: _said.append(text.decode(errors="replace"))))
    llama_cpp.llama_log_set(_kept[0], ctypes.c_void_p())
    return llama_cpp


def quantize(source: Path, target: Path, kind: str, imatrix: Mapping[str, NDArray[Any]] | None = None) -> None:
    """Write a float GGUF file again as a type of llama.cpp, e.g. `Q4_K_M`, by its own quantizer.
    `imatrix`: tensor -> mean square of each input, float32.

    Raises StageError if it cannot.
    """
    library = _library()
    params = library.llama_model_quantize_default_params()
    params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = cpu_threads()
    if imatrix:
        held = [(name.encode(), values) for name, values in imatrix.items()]
        rows = (library.llama_model_imatrix_data * (len(held) + 1))()
        for row, (name, values) in zip(rows, held, strict=False):
            row.name, row.size = name, len(values)
            row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = rows
    _said.clear()
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise StageError(f"llama.cpp cannot quantize it to {kind}", where="gguf", why=_last_words())


def quantized_rows(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """float32 [rows, columns] -> uint8 [rows, bytes of a row], rounded by ggml to one of its types."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    _library()
    from llama_cpp._ggml import libggml

    number, values = GGMLQuantizationType[kind], np.ascontiguousarray(values, dtype=np.float32)
    found = np.empty(quant_shape_to_byte_shape(values.shape, number), dtype=np.uint8)
    places = (ctypes.c_void_p(each.ctypes.data) for each in (values, found))
    sizes = (ctypes.c_int64(size) for size in (0, *values.shape))
    libggml.ggml_quantize_chunk(ctypes.c_int(number), *places, *sizes, ctypes.c_void_p())
    return found


def tokens_of(file: Path, text: str) -> list[int]:
    """Return the tokens that llama.cpp makes of a text, with its first and last ones."""
    library = _library()
    params = library.llama_model_default_params()
    params.vocab_only = True
    with _model(file, params) as model:
        vocabulary, data = library.llama_model_get_vocab(model), text.encode()
        found = (library.llama_token * (len(data) + 8))()
        count = library.llama_tokenize(vocabulary, data, len(data), found, len(found), True, False)
        return list(found[: max(count, 0)])


@contextmanager
def _model(file: Path, params: Any) -> Iterator[Any]:
    library = _library()
    opened = _open(file, params)
    try:
        yield opened
    finally:
        library.llama_model_free(opened)


def _open(file: Path, params: Any) -> Any:
    _said.clear()
    opened = _library().llama_model_load_from_file(str(file).encode(), params)
    if not opened:
        raise SourceError("llama.cpp cannot open it", where=str(file), why=_last_words(), remedy="Make it again")
    return opened


class LlamaCppModel:
    """A GGUF file that llama.cpp has open."""

    def __init__(self, file: Path, device: str) -> None:
        """Raises SourceError if llama.cpp cannot open it, ResourceError without such a device."""
        library = _library()
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0 if device == "cpu" else 1 << 16
        if device != "cpu" and not library.llama_supports_gpu_offload():
            raise ResourceError(
                f"this build of llama-cpp-python has no {device}", where=str(file), remedy="Take --device cpu"
            )
        self.file = file
        self._model = _open(file, params)
        self._context: Any = None
        self._room = (0, 0)
        self.vocabulary = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))

    def start(self, sequences: int, length: int) -> None:
        """Begin anew, with room for sequences of `length` tokens. Raises ResourceError without
        memory.
        """
        library = _library()
        if self._context and self._room[0] == sequences and self._room[1] >= length:
            library.llama_memory_clear(library.llama_get_memory(self._context), True)
            return
        self._drop_context()
        params = library.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * -(-length // 256) * 256
        params.n_batch = params.n_ubatch = max(CHUNK, sequences)
        params.n_threads = params.n_threads_batch = cpu_threads()
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ResourceError(
                f"llama.cpp has no room for {sequences} x {length:,} tokens", where=str(self.file), why=_last_words()
            )
        self._room = (sequences, length)

    def append(self, places: Sequence[tuple[int, int, int]]) -> NDArray[Any]:
        """Read tokens, given as (token, position, sequence), and return the logits after each,
        float32 [tokens, vocabulary].
        """
        library, parts = _library(), []
        for start in range(0, len(places), CHUNK):
            part = places[start : start + CHUNK]
            batch = library.llama_batch_init(len(part), 0, 1)
            try:
                batch.n_tokens = len(part)
                for index, (token, position, sequence) in enumerate(part):
                    batch.token[index], batch.pos[index] = token, position
                    batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                    batch.logits[index] = 1
                if library.llama_decode(self._context, batch):
                    raise ResourceError("llama.cpp cannot go on", where=str(self.file), why=_last_words())
            finally:
                library.llama_batch_free(batch)
            shape = (len(part), self.vocabulary)
            parts.append(np.ctypeslib.as_array(library.llama_get_logits(self._context), shape=shape).copy())
        return np.concatenate(parts)

    def close(self) -> None:
        """Give the memory back."""
        self._drop_context()
        if self._model:
            _library().llama_model_free(self._model)
            self._model = None

    def _drop_context(self) -> None:
        if self._context:
            _library().llama_free(self._context)
            self._context = None


def _last_words() -> str:
    lines = [line.strip() for line in "".join(_said).splitlines() if line.strip(" .\n")]
    return "; ".join(lines[-2:]) or "It says no more"
