"""Open a model directory with ONNX Runtime GenAI.
It gives its logits for the tokens of a request, and its own greedy continuation.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

BUILDS = {"": "onnxruntime-genai", "cuda": "onnxruntime-genai-cuda", "dml": "onnxruntime-genai-directml"}
"""Provider of genai_config.json -> the distribution that has it."""
PACKAGES = (*BUILDS.values(), "onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "numpy")
CONFIG = "genai_config.json"


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return the build that has the providers of the model, if it is not installed.
    On a CPU every build will do.
    """
    wanted = "" if request["device"] == "cpu" else next(iter(_providers(Path(request["directory"]))), "")
    builds = [BUILDS[wanted]] if BUILDS.get(wanted) and wanted else list(BUILDS.values())
    return [] if any(name in versions for name in builds) else builds[:1]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, shape of the logits and generated tokens.
    The logits go to the file that the request names, as raw float32.

    genai_config.json is followed but for two things: its providers if a CPU is asked for, and
    the token that ends a text.
    """
    import numpy as np
    import onnxruntime_genai as og

    tokens, count = request["tokens"], request["new_tokens"]
    with tempfile.TemporaryDirectory() as folder:
        config = og.Config(str(_endless(Path(request["directory"]).absolute(), Path(folder))))
        if request["device"] == "cpu":
            config.clear_providers()
        model = og.Model(config)
    wanted = og.GeneratorParams(model)
    wanted.set_search_options(do_sample=False, num_beams=1, batch_size=1, min_length=0, max_length=len(tokens) + count)
    generator = og.Generator(model, wanted)
    generator.append_tokens(np.array([tokens], dtype=np.int32))
    found = generator.get_output("logits")
    logits = np.ascontiguousarray(found[0], dtype=np.float32)
    logits.tofile(request["logits"])
    generated: list[int] = []
    while len(generated) < count and not generator.is_done():
        generator.generate_next_token()
        generated.append(int(generator.get_next_tokens()[0]))
    return {
        "device": str(model.device_type).lower(),
        "dtype": str(found.dtype),
        "logits_shape": list(logits.shape),
        "generated": generated,
    }


def _endless(directory: Path, folder: Path) -> Path:
    """Show a directory in a folder, with a config that names no token that ends a text.
    So the continuation never ends early.
    """
    for path in directory.iterdir():
        if path.name != CONFIG:
            (folder / path.name).symlink_to(path)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    config["model"]["eos_token_id"] = []
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def _providers(directory: Path) -> list[str]:
    """Return the providers that genai_config.json names, in its order."""
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    options = config["model"].get("decoder", {}).get("session_options", {}).get("provider_options", [])
    return [name.lower() for each in options for name in each]
