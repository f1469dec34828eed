"""Every boundary on which files of others come in: what is malformed is refused as the file's
fault, and nothing else happens.

Each property draws its damage from `tests.support.mutations`: what is read either is read, or ends
in an OptkitError, in bounded memory.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from optkit.errors import OptkitError
from optkit.model.adapter import read_adapter
from optkit.model.checkpoint import INDEX, Checkpoint
from optkit.model.gguf_file import read_gguf
from optkit.model.pooling import read_pooling
from optkit.model.safetensors_file import read_header
from optkit.source.calibration import load_tokenizer
from optkit.source.directory import check_directory
from optkit.source.gguf_llama import checkpoint_shape
from optkit.source.tokenizer import refuse_other_tokens
from tests.conftest import TinyModel
from tests.support import mutations
from tests.support.fuzzing import Changed, damages, read_or_refused
from tests.support.planning import plan_of
from tests.support.running import run_stage

HEADER = {"a.weight": ("F32", (4, 8), 128), "b": ("BF16", (3,), 6), "c": ("I8", (), 1), "d": ("F4", (2, 4), 4)}
VALID_HEADER = mutations.safetensors_bytes(HEADER, {"format": "pt"})


def test_the_valid_header_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(VALID_HEADER)
    assert {name: (info.dtype, info.shape) for name, info in read_header(tmp_path / "x").items()} == {
        name: (dtype, shape) for name, (dtype, shape, _) in HEADER.items()
    }


@damages(250)
def test_headers_of_safetensors(tmp_path: Path, draw: Random) -> None:
    from safetensors import SafetensorError, safe_open

    path = tmp_path / "x"
    path.write_bytes(mutations.damaged_safetensors(VALID_HEADER, draw))
    if read_or_refused(lambda: read_header(path)):
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except SafetensorError as error:
            pytest.fail(f"optkit takes what the library refuses: {error}")


@pytest.fixture(scope="module")
def sharded(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in two files with an index."""
    from safetensors.torch import load_file, save_file

    target = Path(shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("sharded") / "model"))
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    places = {name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in sorted({*places.values()}):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, target / file)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}), encoding="utf-8")
    return target


@damages(80)
def test_indexes(sharded: Path, draw: Random) -> None:
    kept = (sharded / INDEX).read_bytes()
    try:
        (sharded / INDEX).write_bytes(mutations.damaged_json_text(json.loads(kept), draw))
        read_or_refused(lambda: check_directory(sharded, trust_remote_code=False))
    finally:
        (sharded / INDEX).write_bytes(kept)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose files a test may change for a while."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("changed") / "model"))


def planned(model: Path, store: Path) -> None:
    """Read a model's config and plan what could be done with it; no torch."""
    check_directory(model, trust_remote_code=False)
    shape = Checkpoint(model).shape
    shape.block_bytes, shape.outside_bytes, shape.positions, shape.task, shape.block_count  # noqa: B018
    for stage in (
        "{gptq: {group_size: 32}}",
        "bf16",
        "{prune_structured: {blocks: 1}}",
        "{awq: {group_size: 32}}",
        "{rotate: {}}",
    ):
        text = f"model: {json.dumps(str(model))}\nstages: [{stage}]\nevals: [footprint, perplexity, throughput]\n"
        try:
            plan_of(text, store)
        except OptkitError:
            continue


@damages(60)
def test_configs(model: Path, tmp_path: Path, draw: Random) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    with Changed(model / "config.json", mutations.damaged_json_text(config, draw)):
        read_or_refused(lambda: planned(model, tmp_path / "store"))


@damages(30)
def test_configs_that_models_are_built_of(model: Path, draw: Random) -> None:
    from optkit.model.skeleton import Skeleton
    from optkit.session import open_session

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))

    def build() -> None:
        check_directory(model, trust_remote_code=False)
        Skeleton(Checkpoint(model))
        open_session(model, (), "cpu").close()

    with Changed(model / "config.json", mutations.damaged_json_text(config, draw)):
        read_or_refused(build)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
@damages(15)
def test_files_that_transformers_reads(model: Path, draw: Random, file: str) -> None:
    from optkit.session import open_session

    def build() -> None:
        open_session(model, (), "cpu").close()
        load_tokenizer(model)("a text")

    with Changed(
        model / file, mutations.damaged_json_text(json.loads((model / file).read_text(encoding="utf-8")), draw)
    ):
        read_or_refused(build)


@damages(40)
def test_tokenizers(model: Path, tiny_model: TinyModel, draw: Random) -> None:
    valid = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    with Changed(model / "tokenizer.json", mutations.damaged_json_text(valid, draw)):
        read_or_refused(lambda: load_tokenizer(model)("a text"))
        read_or_refused(lambda: refuse_other_tokens("draft", model, "model", tiny_model("llama"), "", ""))


MODULES = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]


@damages(100)
def test_modules_of_embeddings(model: Path, draw: Random) -> None:
    with Changed(model / "modules.json", mutations.damaged_json_text(MODULES, draw)):
        read_or_refused(lambda: read_pooling(model))


METADATA = [
    ("general.architecture", "str", "llama"), ("general.alignment", "u32", 32), ("llama.block_count", "u32", 1),
    ("llama.context_length", "u32", 64), ("llama.embedding_length", "u32", 32), ("llama.feed_forward_length",
    "u32", 64),
    ("llama.attention.head_count", "u32", 2),
    ("llama.attention.head_count_kv", "u32", 1), ("llama.rope.freq_base", "f32", 10000.0),
    ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
    ("tokenizer.ggml.tokens", "arr", ("str", ["a", "b", "c"])), ("tokenizer.ggml.bos_token_id", "u32", 1),
    ("tokenizer.ggml.scores", "arr", ("f32", [0.0])),
]  # fmt: skip
TENSORS = [
    ("token_embd.weight", (32, 8), 0, 1024), ("output_norm.weight", (32,), 0, 128),
    *((f"blk.0.{name}.weight", dimensions, 8, size) for name, dimensions, size in (
        ("attn_q", (32, 32), 1088), ("attn_k", (32, 16), 544), ("attn_v", (32, 16), 544), ("attn_output", (32,
        32), 1088),
        ("ffn_gate", (32, 64), 2176), ("ffn_up", (32, 64), 2176), ("ffn_down", (64, 32), 2176),
    )),
    *((f"blk.0.{name}.weight", (32,), 0, 128) for name in ("attn_norm", "ffn_norm")),
]  # fmt: skip


def test_the_valid_gguf_is_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(mutations.gguf_bytes(METADATA, TENSORS))
    shape = checkpoint_shape(read_gguf(tmp_path / "x.gguf"))
    assert (len(shape.tensors), shape.config["vocab_size"]) == (11, 8)


@damages(250)
def test_gguf_files(tmp_path: Path, draw: Random) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "x.gguf"
    path.write_bytes(mutations.damaged_gguf(METADATA, TENSORS, draw))
    read_or_refused(lambda: checkpoint_shape(read_gguf(path)))


@damages(100)
def test_onnx_files(
    tiny_onnx: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    from optkit.model.onnx_shape import onnx_shape
    from optkit.onnx.directory import OnnxDirectory

    place = tmp_path_factory.getbasetemp() / "damaged-onnx"
    if not place.exists():
        shutil.copytree(tiny_onnx("llama", "fp32"), place)

    def read() -> None:
        found = OnnxDirectory(place)
        assert len(found.cache) + len(found.graph.files)
        found.vocabulary, found.positions  # noqa: B018
        assert onnx_shape(place).size_bytes >= 0

    name = draw.choice(("model.onnx", "model.onnx", "model.onnx", "genai_config.json", "config.json"))
    valid = (place / name).read_bytes()
    damaged = (
        mutations.damaged_json_text(json.loads(valid), draw)
        if name.endswith(".json")
        else mutations.damaged_bytes(valid, draw)
    )
    with Changed(place / name, damaged):
        read_or_refused(read)


@pytest.fixture(scope="module")
def packed(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from optkit.progress import SilentProgress
    from optkit.stage import Context
    from optkit.stages.rtn import Rtn

    target = tmp_path_factory.mktemp("packed") / "model"
    run_stage(
        Rtn(bits=4, group_size=32),
        tiny_model("llama"),
        target,
        Context(device="cpu", seed=0, progress=SilentProgress()),
    )
    return target


@damages(60)
def test_quantization_configs(packed: Path, draw: Random) -> None:
    from optkit.kernels.quant_methods import quantized_layers
    from optkit.verification.layers import problems_of_layers

    def read() -> None:
        checkpoint = Checkpoint(packed)
        quantized_layers(checkpoint)
        try:
            problems_of_layers(checkpoint)
        except ValueError:
            return  # a format that is not known

    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = mutations.damaged_json(config["quantization_config"], draw)
    with Changed(packed / "config.json", json.dumps(config).encode("utf-8", "surrogatepass")):
        read_or_refused(read)


ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 4.0}, "use_rslora": False,
    "target_modules": ["q_proj", "k_proj"],
}  # fmt: skip


@damages(150)
def test_adapters(tmp_path: Path, draw: Random) -> None:
    place = tmp_path / "adapter"
    place.mkdir(exist_ok=True)
    sizes = {"q_proj": 2, "k_proj": 4}
    halves = {
        f"base_model.model.{layer}.lora_{half}.weight": ("F32", shape, 4 * rank * 8)
        for layer, rank in sizes.items()
        for half, shape in (("A", (rank, 8)), ("B", (8, rank)))
    }
    weights = mutations.safetensors_bytes(halves)
    (place / "adapter_config.json").write_text(json.dumps(ADAPTER), encoding="utf-8")
    (place / "adapter_model.safetensors").write_bytes(weights)
    assert read_adapter(tmp_path) is not None
    if draw.random() < 0.7:
        (place / "adapter_config.json").write_bytes(mutations.damaged_json_text(ADAPTER, draw))
    else:
        (place / "adapter_model.safetensors").write_bytes(mutations.damaged_safetensors(weights, draw))
    read_or_refused(lambda: read_adapter(tmp_path))
