"""Generate with ONNX Runtime GenAI, which reads genai_config.json and drives ONNX Runtime."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit.errors import MissingPackageError, SourceError
from optkit.onnx.builds import UNUSABLE
from optkit.onnx.directory import GENAI_CONFIG, OnnxDirectory
from optkit.onnx.opening import import_runtime, runtime_errors, torch_threads

BUILDS = {"cpu": "onnxruntime-genai", "cuda": "onnxruntime-genai-cuda"}


class GenaiModel:
    """An ONNX directory that ONNX Runtime GenAI has opened."""

    def __init__(self, directory: OnnxDirectory, device: str = "cpu", threads: int | None = None) -> None:
        """Open it on `cpu`, `cuda` or `cuda:1`.
        `threads`: those within one operation, torch's own number if None.

        Of genai_config.json all is in force but the provider, the threads and the token that ends a
        text. Raises SourceError if it is missing or GenAI refuses the model, MissingPackageError
        if GenAI has no build for the device, ResourceError without memory.
        """
        self._where, self._device = str(directory.directory), device
        if not directory.genai_config:
            raise SourceError(
                f"there is no {GENAI_CONFIG}",
                where=self._where,
                why="ONNX Runtime GenAI reads there what the inputs of the graph are",
                remedy="Export it with exporter: genai, or leave engine: onnxruntime-genai out",
            )
        genai = _import_genai(device, self._where)
        self._genai = genai
        remedy = "Open it on a device with more memory, or export it in a smaller dtype"
        with self._errors("while it was opened", remedy), tempfile.TemporaryDirectory(prefix="genai-") as folder:
            _show(directory, Path(folder), _config(directory, device, threads or torch_threads()))
            self._model: Any = genai.Model(genai.Config(folder))
        self.vocabulary = int(directory.genai_config["model"]["vocab_size"])
        runtime = import_runtime(self._where).__version__
        self.notes = (
            f"onnxruntime-genai {genai.__version__} on onnxruntime {runtime}: generates on "
            f"{str(self._model.device_type).lower()}; logits are computed by onnxruntime itself",
        )
        """What generates, and what it really computes on."""

    def stream(self, tokens: NDArray[np.int32], new_tokens: int) -> Iterator[NDArray[np.int64]]:
        """Read prompts, [batch, prompt], and yield the most likely tokens, [batch], one by one.
        Raises ResourceError.
        """
        batch, prompt = tokens.shape
        with self._errors(
            f"at {batch} x {prompt} tokens and {new_tokens} new ones", "Lower the batch, the prompt or the new tokens"
        ):
            wanted = self._genai.GeneratorParams(self._model)
            wanted.set_search_options(
                do_sample=False, num_beams=1, batch_size=batch, min_length=0, max_length=prompt + new_tokens
            )
            generator = self._genai.Generator(self._model, wanted)
            generator.append_tokens(tokens)
            for _ in range(new_tokens):
                generator.generate_next_token()
                yield generator.get_next_tokens().astype(np.int64)

    def close(self) -> None:
        """Give the memory back."""
        self._model = None

    def _errors(self, what: str, remedy: str) -> Any:
        return runtime_errors(what, self._where, self._device, remedy)


def _config(directory: OnnxDirectory, device: str, threads: int) -> dict[str, Any]:
    """Return genai_config.json for the device and threads, without tokens that end a text.
    So answers never stop early.
    """
    config = deepcopy(directory.genai_config)
    config["model"]["eos_token_id"] = []
    decoder = config["model"]["decoder"]
    kind, _, index = device.partition(":")
    providers = [] if kind == "cpu" else [{kind: {"device_id": index or "0"}}]
    decoder["session_options"] = {
        **decoder.get("session_options", {}),
        "intra_op_num_threads": threads,
        "provider_options": providers,
    }
    return config


def _show(directory: OnnxDirectory, folder: Path, config: dict[str, Any]) -> None:
    """Fill a folder that GenAI opens in place of the directory.
    GenAI refuses paths that lead out of the one that holds its config.
    """
    for path in directory.directory.iterdir():
        if path.name != GENAI_CONFIG:
            (folder / path.name).symlink_to(path.absolute())
    (folder / GENAI_CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _import_genai(device: str, where: str) -> Any:
    build = BUILDS[device.partition(":")[0]]
    try:
        import onnxruntime_genai
    except UNUSABLE as error:
        raise MissingPackageError(
            build, where=where, install="optkit[onnx]" if device == "cpu" else "optkit[onnx-gpu]"
        ) from error
    if device != "cpu" and not onnxruntime_genai.is_cuda_available():
        raise MissingPackageError(build, where=f"{where} on {device}", install="optkit[onnx-gpu]")
    return onnxruntime_genai
