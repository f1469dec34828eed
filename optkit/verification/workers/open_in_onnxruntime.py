"""Run model.onnx with plain onnxruntime and a loop of its own.
It gives logits for the tokens of a request, and a greedy continuation.
"""

import ctypes
import json
import math
from pathlib import Path
from typing import Any

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "numpy")
ELEMENTS = {"float": 1, "float16": 10, "double": 11, "bfloat16": 16}
"""Numbers of ONNX's float dtypes, by their names in `tensor(...)`."""
NAMES = {"float": "float32", "double": "float64"}
"""Dtypes that have another name elsewhere."""
INTEGERS = {"int64": "int64", "int32": "int32"}
"""Dtypes of inputs that are no part of a KV cache."""
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return `onnxruntime` if no build of it is installed.
    Return `onnxruntime-gpu` if a GPU is asked for and that build is missing.
    """
    if request["device"] != "cpu":
        return [] if "onnxruntime-gpu" in versions else ["onnxruntime-gpu"]
    return [] if any(name.startswith("onnxruntime") for name in versions) else ["onnxruntime"]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, shape of the logits and generated tokens.
    The logits go to the file that the request names, as raw float32.
    """
    import numpy as np

    if request.get("target"):
        return decode(request)
    if "mask" in request:
        return encode(request)
    model = Model(Path(request["directory"]), request["device"])
    logits = model.append(request["tokens"])
    np.ascontiguousarray(logits).tofile(request["logits"])
    generated: list[int] = []
    last = logits[-1]
    for _ in range(request["new_tokens"]):
        generated.append(int(last.argmax()))
        if len(generated) < request["new_tokens"]:
            last = model.append(generated[-1:])[-1]
    return {
        "device": request["device"],
        "dtype": model.dtype,
        "logits_shape": list(logits.shape),
        "generated": generated,
    }


def encode(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype and shape of what an encoder gives for padded texts.
    The numbers go to the file that the request names.
    """
    import numpy as np
    from onnxruntime import OrtValue

    session = open_session(Path(request["directory"]), request["device"])
    outputs = {each.name: each for each in session.get_outputs()}
    output = next((name for name in request["outputs"] if name in outputs), "")
    if not output:
        raise ValueError(f"it has no output `{request['outputs'][0]}`, but {', '.join(outputs)}")
    tokens, mask = np.array(request["tokens"]), np.array(request["mask"])
    known = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
    feeds = {}
    for each in session.get_inputs():
        if each.name not in known:
            raise ValueError(f"it asks for the input `{each.name}`, and this worker knows {', '.join(known)}")
        feeds[each.name] = OrtValue.ortvalue_from_numpy(known[each.name].astype(INTEGERS[_kind(each.type)]))
    found = _float32(session.run_with_ort_values([output], feeds)[0])
    np.ascontiguousarray(found).tofile(request["logits"])
    kind = _kind(outputs[output].type)
    return {
        "device": request["device"],
        "dtype": NAMES.get(kind, kind),
        "logits_shape": list(found.shape),
        "generated": [],
    }


def decode(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype and shape of an encoder-decoder's logits of a target, its second half behind
    the KV cache of the first. The numbers go to the file that the request names.
    """
    import numpy as np
    from onnxruntime import OrtValue

    names = ("encoder_model", "decoder_model", "decoder_with_past_model")
    encoder, first, second = (
        open_session(Path(request["directory"]), request["device"], f"{each}.onnx") for each in names
    )
    tokens, target = np.array(request["tokens"]), np.array(request["target"])
    mask = np.ones(tokens.shape[:2], np.int64)
    known: dict[str, Any] = {"attention_mask": mask, "encoder_attention_mask": mask}
    known["input_features"] = tokens.astype(np.float32)
    logits = []
    for session, given in ((encoder, tokens), *zip((first, second), np.array_split(target, 2, axis=1), strict=True)):
        known["input_ids"] = given
        values = {each.name: known[each.name] for each in session.get_inputs()}
        feeds = {
            name: value if isinstance(value, OrtValue) else OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in values.items()
        }
        outputs = [each.name for each in session.get_outputs()]
        made = dict(zip(outputs, session.run_with_ort_values(outputs, feeds), strict=True))
        known |= {name.replace("present", "past_key_values"): value for name, value in made.items()}
        known["encoder_hidden_states"] = known["last_hidden_state"]
        logits += [made["logits"]] if "logits" in made else []
    both = np.concatenate([_float32(each) for each in logits], axis=1)
    np.ascontiguousarray(both).tofile(request["logits"])
    kind = _kind(logits[0].data_type())
    shape = list(both.shape)
    return {"device": request["device"], "dtype": NAMES.get(kind, kind), "logits_shape": shape, "generated": []}


def open_session(directory: Path, device: str, name: str = "model.onnx") -> Any:
    """Return an open session of onnxruntime; raises RuntimeError if it uses another device."""
    import onnxruntime

    if device != "cpu":
        onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    asked = list(dict.fromkeys((PROVIDERS[device], PROVIDERS["cpu"])))
    session = onnxruntime.InferenceSession(str(directory / name), options, providers=asked)
    if (used := session.get_providers()[0]) != asked[0]:
        raise RuntimeError(f"onnxruntime could not use {asked[0]} and fell back to {used}")
    return session


class Model:
    """An open session and what it has seen so far."""

    def __init__(self, directory: Path, device: str) -> None:
        """Raises RuntimeError if onnxruntime falls back to another device.
        Raises ValueError for inputs that no text model has.
        """
        self._session = open_session(directory, device)
        self._inputs = {each.name: each for each in self._session.get_inputs()}
        outputs = {each.name: each for each in self._session.get_outputs()}
        if "logits" not in outputs:
            raise ValueError(f"it has no output `logits`, but {', '.join(outputs)}")
        self._outputs = list(outputs)
        self._presents = _presents(directory, self._inputs, outputs)
        self._past = {name: _empty(self._inputs[name]) for name in self._presents}
        kind = _kind(outputs["logits"].type)
        self.dtype = NAMES.get(kind, kind)
        self._seen: list[int] = []

    def append(self, tokens: list[int]) -> Any:
        """Return the logits after each of some more tokens, float32 [tokens, vocabulary].
        Without a KV cache all are computed again.
        """
        from onnxruntime import OrtValue

        self._seen += tokens
        read = tokens if self._presents else self._seen
        feeds = {
            name: OrtValue.ortvalue_from_numpy(self._numbers(name, len(read), read))
            for name in self._inputs
            if name not in self._past
        }
        found = dict(
            zip(self._outputs, self._session.run_with_ort_values(self._outputs, feeds | self._past), strict=True)
        )
        self._past = {past: found[present] for past, present in self._presents.items()}
        return _float32(found["logits"])[0, -len(tokens) :]

    def _numbers(self, name: str, read: int, tokens: list[int]) -> Any:
        """Return what an input that is no part of the KV cache gets, integers [1, tokens]."""
        import numpy as np

        whole = len(self._seen)
        rows = {
            "input_ids": lambda: tokens,
            "attention_mask": lambda: [1] * whole,
            "position_ids": lambda: range(whole - read, whole),
            "token_type_ids": lambda: [0] * read,
        }
        if name not in rows:
            raise ValueError(f"it asks for the input `{name}`, and this loop knows {', '.join(rows)} and the KV cache")
        return np.array([rows[name]()], dtype=INTEGERS[_kind(self._inputs[name].type)])


def _presents(directory: Path, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, str]:
    """Return input of the KV cache -> output that takes its place.
    genai_config.json says it, else the names that exporters give.
    """
    pairs: dict[str, str] = {}
    place = directory / "genai_config.json"
    decoder = json.loads(place.read_text(encoding="utf-8"))["model"].get("decoder", {}) if place.is_file() else {}
    for kind in ("key", "value"):
        before, after = (
            decoder.get("inputs", {}).get(f"past_{kind}_names"),
            decoder.get("outputs", {}).get(f"present_{kind}_names"),
        )
        if before and after:
            pairs |= {before % layer: after % layer for layer in range(decoder["num_hidden_layers"])}
    if not pairs:
        pairs = {
            name: name.replace("past_key_values", "present") for name in inputs if name.startswith("past_key_values")
        }
    lost = [name for name in (*pairs, *pairs.values()) if name not in inputs and name not in outputs]
    if lost:
        raise ValueError(f"the KV cache should have `{lost[0]}`, and the graph has no such input or output")
    return pairs


def _empty(port: Any) -> Any:
    """Return the KV cache of no tokens.
    The first free dimension is the batch, the others are lengths.
    """
    from onnxruntime import OrtValue

    shape = [size if isinstance(size, int) else int(index == 0) for index, size in enumerate(port.shape)]
    return OrtValue.ortvalue_from_shape_and_type(shape, ELEMENTS[_kind(port.type)])


def _kind(text: str) -> str:
    """`tensor(float16)` -> `float16`."""
    return text.removeprefix("tensor(").removesuffix(")")


def _float32(value: Any) -> Any:
    """Return an OrtValue in main memory as a float32 array.
    NumPy has no bfloat16, which is the upper half of a float32.
    """
    import numpy as np

    if _kind(value.data_type()) != "bfloat16":
        return value.numpy().astype(np.float32)
    shape = value.shape()
    halves = np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * math.prod(shape)), dtype=np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
