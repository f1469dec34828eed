"""Run model.gguf in llama.cpp.
It gives logits for the tokens of a request, and a greedy continuation.
"""

from pathlib import Path
from typing import Any

PACKAGES = ("llama-cpp-python", "numpy")


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return `llama-cpp-python` if it is not installed."""
    return [] if "llama-cpp-python" in versions else ["llama-cpp-python"]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, shape of the logits and generated tokens.
    The logits go to the file that the request names, as raw float32.
    """
    import numpy as np
    from llama_cpp import Llama

    tokens, wanted = request["tokens"], request["new_tokens"]
    model = Llama(
        str(Path(request["directory"]) / "model.gguf"),
        n_ctx=len(tokens) + wanted,
        n_gpu_layers=0 if request["device"] == "cpu" else -1,
        logits_all=True,
        verbose=False,
    )
    model.eval(tokens)
    np.ascontiguousarray(model.scores[: len(tokens)], dtype=np.float32).tofile(request["logits"])
    generated: list[int] = []
    for _ in range(wanted):
        generated.append(int(model.scores[model.n_tokens - 1].argmax()))
        if len(generated) < wanted:
            model.eval(generated[-1:])
    return {
        "device": request["device"],
        "dtype": "float16",  # of keys and values
        "logits_shape": [len(tokens), int(model.n_vocab())],
        "generated": generated,
    }
