"""Decoders on ONNX Runtime: whole sequences, prompts and steps say the same, whatever their KV
cache is like.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optkit.errors import MissingPackageError, OptkitError, ResourceError, SourceError
from optkit.model.onnx_file import OnnxFile
from optkit.onnx import opening, runtime
from optkit.onnx.decode_bytes import decode_bytes
from optkit.onnx.directory import OnnxDirectory
from optkit.onnx.runtime import OnnxRunner
from optkit.session.onnx_session import OnnxSession
from optkit.stage import Opening
from tests.support.handmade_decoder import VOCABULARY, expected, handmade
from tests.support.near import near
from tests.support.onnx_changes import change_graph
from tests.support.opened import transformers_logits

TinyOnnx = Callable[[str, str], Path]
TOLERANCE = {"float": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}
"""Shares of the largest logit."""


class LargeTensors(TorchDispatchMode):
    """Names the operations of torch that make a tensor of at least `least` elements, as those do
    that wake its threads.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.names = least, set[str]()

    def __torch_dispatch__(self, operation: Any, _types: Any, given: tuple[Any, ...] = (), options: Any = None) -> Any:
        made = operation(*given, **(options or {}))
        views = isinstance(made, Tensor) and made.data_ptr() in {
            each.data_ptr() for each in given if isinstance(each, Tensor)
        }
        if isinstance(made, Tensor) and made.numel() >= self.least and not views:
            self.names.add(str(operation))
        return made


def some_tokens(rows: int, length: int, vocabulary: int = 512) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_prompt_and_ten_steps_are_one_long_sequence(tiny_onnx: TinyOnnx, precision: str, batch: int) -> None:
    runner = OnnxRunner(tiny_onnx("llama", precision))
    tokens = some_tokens(batch, 27)
    whole = runner.logits(tokens)
    decoding = runner.prefill(tokens[:, :17], 27)
    assert near(decoding.logits, whole[:, 16])
    for position in range(17, 27):
        assert near(decoding.step(tokens[:, position]), whole[:, position])
    assert decoding.position == 27
    with pytest.raises(OptkitError, match="28 tokens do not fit into a KV cache of 27"):
        decoding.step(tokens[:, 0])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_are_those_of_torch(tiny_onnx: TinyOnnx, tiny_model: Callable[[str], Path], kind: str) -> None:
    tokens = some_tokens(2, 40)
    theirs = transformers_logits(tiny_model(kind), tokens, dtype=torch.float32)
    assert near(OnnxRunner(tiny_onnx(kind, "fp32")).logits(tokens), theirs)


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_that_grows(tmp_path: Path, dtype: str, batch: int) -> None:
    runner = OnnxRunner(handmade(tmp_path / "m", dtype))
    tokens = some_tokens(batch, 30, VOCABULARY)
    limit = TOLERANCE[dtype]
    whole = runner.logits(tokens)
    assert whole.dtype == torch.float32
    assert near(whole, expected(tokens), limit)
    decoding = runner.prefill(tokens[:, :20], 30)
    assert near(decoding.logits, whole[:, 19], limit)
    for position in range(20, 30):
        assert near(decoding.step(tokens[:, position]), whole[:, position], limit)


def test_a_model_without_a_cache(tmp_path: Path) -> None:
    runner = OnnxRunner(handmade(tmp_path / "m", cached=False))
    tokens = some_tokens(2, 9, VOCABULARY)
    assert near(runner.logits(tokens), expected(tokens))
    with pytest.raises(OptkitError, match="the graph has no KV cache"):
        runner.prefill(tokens, 12)


@pytest.mark.parametrize("kind", ["shared", "growing"])
def test_long_sequences_go_in_parts(
    tiny_onnx: TinyOnnx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    directory, vocabulary = (
        (tiny_onnx("llama", "fp32"), 512) if kind == "shared" else (handmade(tmp_path / "m"), VOCABULARY)
    )
    runner = OnnxRunner(directory)
    tokens = some_tokens(3, 50, vocabulary)
    whole = runner.logits(tokens)
    monkeypatch.setattr(runtime, "TOKENS_AT_ONCE", 16)
    assert near(runner.logits(tokens), whole)
    assert near(runner.prefill(tokens[:1], 60).logits, whole[:1, -1])
    assert near(runner.prefill(tokens, 60).logits, whole[:, -1])


def test_inputs_that_are_rounded_together_are_computed_together(tmp_path: Path) -> None:
    directory = handmade(tmp_path / "m")
    assert OnnxRunner(directory).sliceable
    change_graph(
        directory,
        lambda model: model.graph.node.append(onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["a", "b", "c"])),
    )
    assert not OnnxRunner(directory).sliceable


def test_two_decodings_at_once(tiny_onnx: TinyOnnx) -> None:
    runner = OnnxRunner(tiny_onnx("llama", "fp32"))
    tokens = some_tokens(2, 20)
    whole = runner.logits(tokens)
    first, second = (runner.prefill(tokens[row : row + 1, :10], 20) for row in range(2))
    for position in range(10, 20):
        assert near(first.step(tokens[:1, position]), whole[:1, position])
        assert near(second.step(tokens[1:, position]), whole[1:, position])


def test_threads_follow_torch(tiny_onnx: TinyOnnx) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        runner = OnnxRunner(tiny_onnx("llama", "fp32"))
    finally:
        torch.set_num_threads(before)
    assert runner.opened.session.get_session_options().intra_op_num_threads == 3
    assert (
        OnnxRunner(tiny_onnx("llama", "fp32"), threads=2).opened.session.get_session_options().intra_op_num_threads == 2
    )


def test_what_computes_is_told(tiny_onnx: TinyOnnx) -> None:
    runner = OnnxRunner(tiny_onnx("llama", "fp32"))
    assert runner.providers == ("CPUExecutionProvider",)
    assert runner.opened.nodes["CPUExecutionProvider"] > 10
    runner.close()
    with pytest.raises(OptkitError, match="the session was closed. Open it again"):
        runner.logits(some_tokens(1, 4))


@pytest.mark.parametrize(
    ("device", "providers", "package"),
    [
        ("cuda", (), "onnxruntime-gpu"),
        ("cuda:1", ["tensorrt", "cuda"], "onnxruntime-gpu"),
        ("cpu", ["openvino"], "onnxruntime-openvino"),
    ],
)
def test_a_provider_that_is_not_installed(tiny_onnx: TinyOnnx, device: str, providers: list[str], package: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        MissingPackageError, match=f"ExecutionProvider of ONNX Runtime: the package `{package}` is not installed"
    ):
        OnnxRunner(tiny_onnx("llama", "fp32"), device, providers=providers)


def test_a_provider_that_nobody_knows_or_of_another_device(tiny_onnx: TinyOnnx) -> None:
    with pytest.raises(OptkitError, match="there is no provider 'npu'. Known: cpu, cuda"):
        OnnxRunner(tiny_onnx("llama", "fp32"), providers=["npu"])
    with pytest.raises(OptkitError, match="the provider tensorrt does not compute on cpu. Use --device cuda"):
        OnnxRunner(tiny_onnx("llama", "fp32"), providers=["tensorrt"])


def test_a_provider_that_does_not_start(tiny_onnx: TinyOnnx, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with (
        pytest.warns(UserWarning, match="not in available provider"),
        pytest.raises(
            OptkitError, match="could not start CUDAExecutionProvider and fell back to CPUExecutionProvider. A library"
        ),
    ):
        opening.open_model(tiny_onnx("llama", "fp32") / "model.onnx", "cuda")


def test_without_the_package(tiny_onnx: TinyOnnx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError, match=r"`onnxruntime` is not installed. Run: pip install 'optkit\[onnx\]'"):
        OnnxRunner(tiny_onnx("llama", "fp32"))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingPackageError, match=r"`onnx` is not installed. Run: pip install 'optkit\[onnx\]'"):
        OnnxRunner(tiny_onnx("llama", "fp32"))


def set_ir(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def set_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 99


def widen(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1]))


def rename_logits(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "embeddings"


def spoil(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Frobnicate"


def misname(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Concat").attribute[0].name = "newer"


def cut(model: onnx.ModelProto) -> None:
    del model.graph.node[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_ir,
            r"the graph is newer than onnxruntime [\d.]+. Unsupported model IR version: 99, "
            r"max supported IR version: \d+",
        ),
        (set_opset, r"the graph is newer than onnxruntime [\d.]+. .*Opset 99 is under development"),
        (widen, "the graph wants images, which optkit cannot fill in"),
        (rename_logits, "the graph has no output 'logits' but embeddings.* It is not a causal language model"),
        (spoil, r"onnxruntime [\d.]+ does not know Frobnicate as the graph uses it.*pip install -U onnxruntime"),
        (misname, r"onnxruntime [\d.]+ does not know Concat as the graph uses it"),
        (cut, "ONNX Runtime failed while it was opened"),
    ],
)
def test_graphs_that_cannot_be_run(tmp_path: Path, change: Callable[[onnx.ModelProto], object], message: str) -> None:
    directory = handmade(tmp_path / "m")
    change_graph(directory, change)
    with pytest.raises(SourceError, match=message) as found:
        OnnxRunner(directory)
    assert "onnxruntime_src" not in str(found.value)


def test_a_dtype_without_a_kernel(tmp_path: Path) -> None:
    directory = handmade(tmp_path / "m", "bfloat16")

    def compute_in_bfloat16(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Cast" and node.output[0] in ("keys", "values"):
                node.attribute[0].i = onnx.TensorProto.BFLOAT16
            if node.op_type == "MatMul" and node.output[0] == "scores":
                node.input[0] = "stored"
            if "least" in node.input:
                node.input[2] = "narrow"
            if node.op_type == "MatMul" and node.output[0] == "float_logits":
                node.input[0] = "wide"
        least = onnx.helper.make_node("Cast", ["least"], ["narrow"], to=onnx.TensorProto.BFLOAT16)
        model.graph.node.insert(0, least)
        index = next(index for index, node in enumerate(model.graph.node) if node.output[0] == "flat")
        model.graph.node.insert(index + 1, onnx.helper.make_node("Cast", ["flat"], ["wide"], to=onnx.TensorProto.FLOAT))

    change_graph(directory, compute_in_bfloat16)
    with pytest.raises(
        SourceError, match=r"ONNX Runtime has no kernel of \w+\(\d+\) for the dtypes that it gets here on cpu"
    ):
        OnnxRunner(directory)


def test_memory_that_runs_out(tmp_path: Path, tiny_onnx: TinyOnnx) -> None:
    runner = OnnxRunner(tiny_onnx("llama", "fp32"))
    with pytest.raises(ResourceError, match=r"out of memory at 1 x 4 tokens, \d+ in all on cpu"):
        runner.prefill(some_tokens(1, 4), 1 << 48)
    huge = handmade(tmp_path / "m", cached=False)

    def blow_up(model: onnx.ModelProto) -> None:
        size = onnx.helper.make_node("Constant", [], ["huge"], value_ints=[1 << 22, 1 << 22, 8])
        model.graph.node.extend([size, onnx.helper.make_node("Expand", ["x", "huge"], ["more"])])
        model.graph.output.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, None))

    change_graph(huge, blow_up)
    with pytest.raises(
        ResourceError,
        match=r"out of memory in the logits of 1 x 1 tokens on cpu. Expand .*Lower the window or the batch",
    ):
        OnnxRunner(huge).logits(some_tokens(1, 1, VOCABULARY))


def test_the_bytes_of_a_step(tiny_onnx: TinyOnnx, tmp_path: Path) -> None:
    tied, untied = OnnxDirectory(tiny_onnx("llama", "fp32")), OnnxDirectory(tiny_onnx("qwen2", "fp32"))
    cache = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, bytes
    assert decode_bytes(tied, 1, 101) - decode_bytes(tied, 1, 100) == cache
    # one row more of cosines and sines
    assert decode_bytes(tied, 2, 100) - decode_bytes(tied, 1, 100) == 100 * cache + 2 * 8 * 4
    assert decode_bytes(tied, 1, 0) > 512 * 64 * 4  # the embedding is lm_head too
    table = next(each for name, each in untied.graph.initializers.items() if "embed" in name)
    weights = sum(each.size_bytes for each in untied.graph.initializers.values())
    assert decode_bytes(untied, 1, 0) < weights - table.size_bytes
    graph = OnnxFile(handmade(tmp_path / "m") / "model.onnx")
    assert {"embedding", "positions"} <= graph.initializers.keys()


def test_data_that_is_lost_after_it_was_read(tiny_onnx: TinyOnnx, tmp_path: Path) -> None:
    directory = OnnxDirectory(Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "m")))
    (directory.directory / "model.onnx.data").unlink()
    with pytest.raises(SourceError, match="ONNX Runtime failed while it was opened"):
        OnnxRunner(directory)


def test_torch_copies_no_logits_between_the_steps(tiny_onnx: TinyOnnx) -> None:
    session = OnnxSession(Opening(tiny_onnx("llama", "fp32")))
    stream = session.stream(some_tokens(1, 12), 4)
    next(stream)
    with LargeTensors(session.vocabulary) as seen:
        assert len(list(stream)) == 3
    assert seen.names == set(), "half of the decode speed of SmolLM2 went to threads of torch that were awake"
    decoding = OnnxRunner(tiny_onnx("llama", "fp32")).prefill(some_tokens(1, 12), 20)
    first = decoding.step(some_tokens(1, 1)[0])
    kept = first.clone()
    decoding.step(some_tokens(1, 1)[0])
    assert first.equal(kept), "the next step leaves them alone"
