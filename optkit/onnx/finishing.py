"""What optkit changes in the graph of GenAI's builder before it is saved (onnx_ir)."""

from __future__ import annotations

import onnx_ir as ir

from optkit.onnx.checker import RUNTIME_DOMAIN

EMBEDDING = "/model/embed_tokens/Gather"
HEAD = "/lm_head/MatMulNBits"


def drop_idle_zero_points(model: ir.Model) -> None:
    """Take zero points that all are 2^(bits - 1) from each MatMulNBits.
    They say what their absence says.
    """
    for node in model.graph:
        if node.op_type == "MatMulNBits" and len(node.inputs) > 3 and node.inputs[3] is not None:
            bits, held = node.attributes["bits"].as_int(), node.inputs[3]
            middle = sum(1 << (bits - 1 + place) for place in range(0, 8, bits))
            if bool((held.const_value.numpy() == middle).all()):
                node.resize_inputs(3)
                del model.graph.initializers[held.name]


def embed_by_head(model: ir.Model) -> None:
    """Let the embedding read the codes of lm_head, the same matrix, instead of float weights."""
    nodes = {node.name: node for node in model.graph}
    embedding, head = nodes[EMBEDDING], nodes[HEAD]
    weight, tokens = embedding.inputs
    outputs, inputs = (head.attributes[name].as_int() for name in ("N", "K"))
    bits = head.attributes["bits"].as_int()
    # A constant in the graph and not an initializer, which would lie outside it, and there shape
    # inference cannot see it.
    shape = ir.node(
        "Constant",
        [],
        {"value": ir.tensor([outputs, inputs * bits // 8], ir.DataType.INT64)},
        name=f"{EMBEDDING}/shape",
    )
    flat = ir.node("Reshape", [head.inputs[1], shape.outputs[0]], name=f"{EMBEDDING}/Reshape")
    gather = ir.node(
        "GatherBlockQuantized",
        [flat.outputs[0], tokens, *head.inputs[2:]],
        {"bits": bits, "block_size": head.attributes["block_size"].as_int(), "gather_axis": 0, "quantize_axis": 1},
        domain=RUNTIME_DOMAIN,
        name=f"{EMBEDDING}BlockQuantized",
    )
    for node in (shape, flat, gather):
        node.outputs[0].name = f"{node.name}/output_0"
    model.graph.insert_before(embedding, [shape, flat, gather])
    old, new = embedding.outputs[0], gather.outputs[0]
    new.dtype, new.shape = old.dtype, old.shape
    ir.convenience.replace_all_uses_with(old, new)
    model.graph.remove(embedding, safe=True)
    del model.graph.initializers[weight.name]
