"""A decoder made by hand whose KV cache grows by concatenation: one head over embeddings, in the
fewest nodes; and what it must say.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper, parser
from torch import Tensor

VOCABULARY, WIDTH, POSITIONS = 32, 8, 64
GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
decoder (int64[b, s] input_ids, int64[b, t] attention_mask, int32[b, s] position_ids, {pasts}) => ({dtype}[b, s, 32] logits, {presents})
<int64 one = {{1}}, int64 zero = {{0}}, float least = {{-1e9}}, int64[1] head = {{1}}>
{{
  embedded = Gather (embedding, input_ids)
  placed = Gather (positions, position_ids)
  x = Add (embedded, placed)
  new = Unsqueeze (x, head)
  stored = Cast <to: int = {number}> (new)
  {cache}
  keys = Cast <to: int = 1> (present_0_key)
  values = Cast <to: int = 1> (present_0_value)
  turned = Transpose <perm = [0, 1, 3, 2]> (keys)
  scores = MatMul (new, turned)
  spans = Shape (scores)
  two = Add (one, one)
  three = Add (two, one)
  height = Gather (spans, two)
  total = Gather (spans, three)
  first = Sub (total, height)
  rows = Range (first, total, one)
  columns = Range (zero, total, one)
  upright = Unsqueeze (rows, head)
  seen = LessOrEqual (columns, upright)
  causal = Where (seen, scores, least)
  shares = Softmax <axis = -1> (causal)
  mixed = MatMul (shares, values)
  flat = Squeeze (mixed, head)
  unembedding = Transpose (embedding)
  float_logits = MatMul (flat, unembedding)
  logits = Cast <to: int = {number}> (float_logits)
}}
"""
NUMBERS = {"float": 1, "float16": 10, "bfloat16": 16}


def handmade(directory: Path, dtype: str = "float", *, cached: bool = True) -> Path:
    """Write the decoder with a cache and logits of `float`, `float16` or `bfloat16`; without a
    cache it reads whole sequences.
    """
    ends = {
        side: f"{dtype}[b, 1, {length}, 8] {side}_0_key, {dtype}[b, 1, {length}, 8] {side}_0_value"
        for side, length in SIDES.items()
    }
    joined = "\n".join(f"present_0_{part} = Concat <axis = 2> (past_0_{part}, stored)" for part in ("key", "value"))
    alone = "\n".join(f"present_0_{part} = Identity (stored)" for part in ("key", "value"))
    text = GRAPH.format(
        pasts=ends["past"],
        presents=ends["present"],
        dtype=dtype,
        number=NUMBERS[dtype],
        cache=joined if cached else alone,
    )
    if not cached:
        text = text.replace(f", {ends['past']}", "").replace(f", {ends['present']}", "")
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights().items())
    directory.mkdir()
    onnx.save(model, directory / "model.onnx")
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}))
    return directory


SIDES = {"past": "p", "present": "q"}


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(rows, WIDTH)).astype(np.float32) for name, rows in TABLES.items()}


TABLES = {"embedding": VOCABULARY, "positions": POSITIONS}


def expected(tokens: Tensor) -> Tensor:
    """int64 [b, s] -> float32 [b, s, v]: what the decoder computes, in float32."""
    embedding, positions = (torch.from_numpy(array) for array in weights().values())
    x = embedding[tokens] + positions[: tokens.shape[1]]
    mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1.0)
    return mixed @ embedding.T
