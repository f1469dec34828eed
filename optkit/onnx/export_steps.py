"""What the export of a decoder needs around the exporter itself.

Files beside the graph, the text that graph and source are compared on, and what the report says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.onnx_shape import GENAI_CONFIG
from optkit.model.packed_floats import forget_packing
from optkit.model.writer import copy_companions
from optkit.onnx.builder import Order
from optkit.onnx.prediction import exported_config
from optkit.source.calibration import load_tokenizer
from optkit.source.texts import TextSource

CHARACTERS = 8_000
"""Of the text that graph and source are compared on."""


def write_beside(order: Order) -> None:
    """Add config.json and every file of the source without weights.
    What the exporter says of the provider is corrected.
    """
    config = exported_config(Checkpoint(order.source).config, order.dtype)
    copy_companions(order.source, order.target, order.trust_remote_code, config)
    forget_packing(order.target)
    path = order.target / GENAI_CONFIG
    if not path.exists():
        return
    genai = json.loads(path.read_text(encoding="utf-8"))
    if order.provider == "cpu":
        genai["model"]["decoder"]["session_options"]["provider_options"] = []
    path.write_text(json.dumps(genai, indent=2) + "\n", encoding="utf-8")


def compared_text(order: Order) -> tuple[str, list[int]]:
    """Return a text to compare on and its tokens.
    Without a tokenizer these are "" and some numbers.
    """
    vocabulary = int(Checkpoint(order.source).config["vocab_size"])
    try:
        tokenizer = load_tokenizer(order.source, order.trust_remote_code)
    except SourceError:
        return "", random.Random(0).choices(range(vocabulary), k=CHARACTERS // 4)
    text = TextSource(dataset="python-reference").joined(None)[:CHARACTERS]
    return text, [each for each in tokenizer(text, verbose=False).input_ids if each < vocabulary]


def choices(order: Order) -> dict[str, Any]:
    """Return what was ordered, as the report says it."""
    if order.exporter != "genai":
        return {"dtype": order.dtype, "kv_cache": order.kv_cache}
    return {
        "target": order.provider,
        "dtype": order.dtype,
        "lm_head": f"{order.head_bits} bits" if order.head_bits else "as in the source",
        "embedding": "the codes of lm_head" if order.shared_embedding else "as in the source",
        "activations": "float" if order.float_activations else "int8",
    }


def notes(order: Order, details: Mapping[str, Any], *others: str) -> tuple[str, ...]:
    """Return what whoever deploys the graph must know; `others` are further sentences, or empty."""
    both = " and the embedding that is tied to it are" if order.shared_embedding else " is"
    rounded = [f"lm_head{both} rounded to {order.head_bits} bits for the export"] if order.head_bits else []
    rounded += (
        []
        if order.float_activations
        else ["ONNX Runtime rounds the inputs of quantized layers to 8 bits while it computes"]
    )
    cost = f"; it costs {details['divergence']:.2g} nats a token" if "divergence" in details else ""
    told = [f"{'; '.join(rounded)}{cost}"] if rounded else []
    unproven = (
        f"the graph was not compared with its source: ONNX Runtime has no kernels of {order.dtype} "
        "here, only with --device cuda"
    )
    proven = "logits_apart" in details
    return tuple(filter(None, (*told, *([] if proven else [unproven]), *others)))
