"""onnx.checker is asked about what it can judge: not about data with hard links, nor about ONNX
Runtime's own operators.
"""

from typing import Any

import pytest

from optkit.onnx.checker import own_nodes, problem_of_graph

onnx = pytest.importorskip("onnx")
helper = onnx.helper
FLOAT = onnx.TensorProto.FLOAT


def made(*nodes: object, opset: int = 21, initializers: tuple[object, ...] = ()) -> Any:
    ends = [helper.make_tensor_value_info(name, FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "made", ends[:1], ends[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def external(name: str) -> Any:
    tensor = onnx.TensorProto(name=name, data_type=FLOAT, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "nowhere.data"
    return tensor


def test_operators_of_onnx_runtime_in_onnx_domain() -> None:
    norm = helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["y"], axis=-1)
    model = made(norm, initializers=(external("scale"),))
    before = model.SerializeToString()
    assert (problem_of_graph(model), own_nodes(model)) == ("", 1)
    assert model.SerializeToString() == before


@pytest.mark.parametrize(("opset", "own"), [(16, 1), (17, 0)])
def test_layer_normalization_is_onnx_own_since_17(opset: int, own: int) -> None:
    model = made(
        helper.make_node("LayerNormalization", ["x", "scale"], ["y"]), opset=opset, initializers=(external("scale"),)
    )
    assert (problem_of_graph(model), own_nodes(model)) == ("", own)


def test_inside_the_branches_of_a_node_too() -> None:
    out = helper.make_tensor_value_info("z", FLOAT, [2, 4])
    inner = helper.make_graph(
        [helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["z"])],
        "inner",
        [],
        [out],
        [external("scale")],
    )
    choose = helper.make_tensor("choose", onnx.TensorProto.BOOL, [], [True])
    model = made(
        helper.make_node("If", ["choose"], ["y"], then_branch=inner, else_branch=inner), initializers=(choose,)
    )
    assert own_nodes(model) == 2
    broken = made(helper.make_node("If", ["choose"], ["y"], then_branch=inner), initializers=(choose,))
    assert problem_of_graph(broken).startswith("Required attribute 'else_branch' is missing.")


def test_a_problem_is_one_line() -> None:
    problem = problem_of_graph(made(helper.make_node("Rellu", ["x"], ["y"], name="first")))
    assert problem.startswith(
        "No Op registered for Rellu with domain_version of 21 ==> Context: Bad node spec for node. Name: first"
    )
