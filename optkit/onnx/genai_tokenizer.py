"""Whether ONNX Runtime GenAI cuts a text into the tokens that transformers does.
Its tokenizer is its own, and reads tokenizer.json anew.

Run as `python -P -m optkit.onnx.genai_tokenizer DIRECTORY` it reads a text from stdin and writes
GenAI's tokens as JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optkit.model.onnx_file import MODEL
from optkit.model.onnx_shape import GENAI_CONFIG
from optkit.processes.commands import python_command, python_environment, run

TOKENIZER = "tokenizer.json"
TIMEOUT_S = 120
BYTE_LEVEL = "ByteLevel"
REMEDY = "give it token ids that transformers' tokenizer made"


def agree_on_tokens(directory: Path, text: str, ids: Sequence[int]) -> str:
    """Return how the tokens of a text differ from transformers' `ids`; empty if they are the same.

    A byte-level tokenizer whose decoder also knows SentencePiece's space (transformers' converter
    from GGUF leaves such) is read wrongly; tokenizer.json is given the byte-level decoder alone
    if the tokens are the same then.
    """
    said = genai_tokens(directory, text)
    if said == list(ids):
        return ""
    kept = (directory / TOKENIZER).read_bytes() if (directory / TOKENIZER).is_file() else b""
    if kept and (plain := _byte_level_alone(json.loads(kept))):
        (directory / TOKENIZER).write_text(json.dumps(plain, indent=2, ensure_ascii=False), encoding="utf-8")
        if genai_tokens(directory, text) == list(ids):
            return ""
        (directory / TOKENIZER).write_bytes(kept)
    if said is None:
        return f"ONNX Runtime GenAI cannot read its tokenizer: {REMEDY}"
    same = next(
        (place for place, (ours, theirs) in enumerate(zip(said, ids, strict=False)) if ours != theirs),
        min(len(said), len(ids)),
    )
    return (
        f"ONNX Runtime GenAI cuts text into other tokens than transformers, from token {same:,} "
        f"of {len(ids):,} on: {REMEDY}"
    )


def genai_tokens(directory: Path, text: str) -> list[int] | None:
    """Return a text's tokens by ONNX Runtime GenAI, in a child process; None if it cannot."""
    command = python_command("-m", "optkit.onnx.genai_tokenizer", str(directory))
    try:
        done = run(command, text=text.encode(), timeout_s=TIMEOUT_S, env=python_environment())
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    found: list[int] = json.loads(done.stdout)
    return found


def _byte_level_alone(tokenizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return a tokenizer with the byte-level decoder alone if it has other steps too.
    None for any other tokenizer.
    """
    decoder = tokenizer.get("decoder") or {}
    last = (decoder.get("decoders") or [{}])[-1]
    if BYTE_LEVEL not in json.dumps(tokenizer.get("pre_tokenizer")) or last.get("type") != BYTE_LEVEL:
        return None
    return {**tokenizer, "decoder": last}


def _tokens(directory: Path, text: str) -> list[int]:
    """Ask GenAI, which wants a model with the tokenizer: a graph that hands tokens on is enough."""
    import onnx
    import onnxruntime_genai as og
    from onnx import TensorProto, helper

    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        for path in directory.iterdir():
            if path.is_file() and not path.name.startswith(MODEL):
                shutil.copyfile(path, work / path.name)
        tokens = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence"])
        graph = helper.make_graph(
            [helper.make_node("Cast", ["input_ids"], ["logits"], to=TensorProto.FLOAT)], "none", [tokens], [logits]
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), work / MODEL)
        config = json.loads((work / GENAI_CONFIG).read_text(encoding="utf-8"))
        config["model"]["decoder"]["session_options"]["provider_options"] = []
        (work / GENAI_CONFIG).write_text(json.dumps(config), encoding="utf-8")
        tokenizer = og.Tokenizer(og.Model(str(work)))
        return [int(each) for each in tokenizer.encode(text)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_tokens(Path(sys.argv[1]), sys.stdin.read())))
