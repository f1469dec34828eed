"""Generate with ONNX Runtime GenAI, the library that reads genai_config.json and drives ONNX Runtime itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.errors import MissingPackageError, SourceError
from optkit.onnx.builds import UNUSABLE
from optkit.onnx.directory import GENAI_CONFIG, OnnxDirectory
from optkit.onnx.opening import import_runtime, runtime_errors, torch_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_TOKEN = 2**31 - 1
"""A token that no model has, in the place of the one that ends a text: answers never stop early."""
BUILDS = {"cpu": "onnxruntime-genai", "cuda": "onnxruntime-genai-cuda"}


class GenaiModel:
    """An ONNX directory that ONNX Runtime GenAI has opened."""

    def __init__(self, directory: OnnxDirectory, device: str = "cpu", threads: int | None = None) -> None:
        """Open it on `cpu`, `cuda` or `cuda:1`; `threads`: those within one operation, torch's own number where None.

        Of genai_config.json all is in force but the provider, the threads and the token that ends a text. Raises SourceError where it is
        missing or GenAI refuses the model, MissingPackageError where GenAI has no build for the device, ResourceError without memory.
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
        with self._errors("while it was opened", "Open it on a device with more memory, or export it in a smaller dtype"):
            config = genai.Config(self._where)
            options = {"intra_op_num_threads": threads or torch_threads()}
            config.overlay(json.dumps({"model": {"eos_token_id": NO_TOKEN, "decoder": {"session_options": options}}}))
            config.clear_providers()
            kind, _, index = device.partition(":")
            if kind != "cpu":
                config.append_provider(kind)
                config.set_provider_option(kind, "device_id", index or "0")
            self._model: Any = genai.Model(config)
        self.vocabulary = int(directory.genai_config["model"]["vocab_size"])
        runtime = import_runtime(self._where).__version__
        self.notes = (
            f"onnxruntime-genai {genai.__version__} on onnxruntime {runtime}: generates on {str(self._model.device_type).lower()};"
            f" logits are computed by onnxruntime itself",
        )
        """What generates, and what it really computes on."""

    def stream(self, tokens: NDArray[np.int32], new_tokens: int) -> Iterator[NDArray[np.int64]]:
        """Read prompts of one length, [batch, prompt], and yield the most likely tokens, [batch], one by one. Raises ResourceError."""
        batch, prompt = tokens.shape
        with self._errors(f"at {batch} x {prompt} tokens and {new_tokens} new ones", "Lower the batch, the prompt or the new tokens"):
            wanted = self._genai.GeneratorParams(self._model)
            wanted.set_search_options(do_sample=False, num_beams=1, batch_size=batch, min_length=0, max_length=prompt + new_tokens)
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


def _import_genai(device: str, where: str) -> Any:
    build = BUILDS[device.partition(":")[0]]
    try:
        import onnxruntime_genai
    except UNUSABLE as error:
        raise MissingPackageError(build, where=where, install="optkit[onnx]" if device == "cpu" else "optkit[onnx-gpu]") from error
    if device != "cpu" and not onnxruntime_genai.is_cuda_available():
        raise MissingPackageError(build, where=f"{where} on {device}", install="optkit[onnx-gpu]")
    return onnxruntime_genai
