"""What a plan says of the memory of evals, against the peak of a process that runs them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from optkit_evals.divergence import Divergence
from optkit_evals.perplexity import Perplexity
from optkit_evals.throughput import Throughput

from optkit.model.checkpoint import Checkpoint
from optkit.model.session_memory import SLICE_BYTES, SessionMemory
from optkit.model.shape import ModelShape, TensorInfo
from optkit.onnx.prediction import compared_shapes, comparing_bytes
from optkit.plan import make_plan, session_memory
from optkit.recipe.recipe import load_recipe
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support.warm import warm_pythons

WINDOW = 1024
CASES = [("perplexity", "float32"), ("perplexity", "bfloat16"), ("divergence", "float32")]
MEASURE = """
import json, os, sys
from pathlib import Path
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
import optkit_evals.divergence, optkit_evals.perplexity
from optkit.measure import EvalContext
from optkit.session import open_session

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def run(kind, directory):
    session = open_session(Path(directory))
    text = {"dataset": "python-reference", "window": int(sys.argv[1]), "windows": 2}
    if kind == "perplexity":
        optkit_evals.perplexity.Perplexity(**text).run(session, EvalContext())
    else:
        optkit_evals.divergence.Divergence(**text).run(session, EvalContext(baseline=open_session(Path(directory))))

def peak(kind, directory, tiny):
    run(kind, tiny)  # libraries load what they need at first use, and pages of theirs are no memory of the eval
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: libraries take more while they are imported
    before = memory("VmRSS")
    run(kind, directory)
    return 1024 * (memory("VmHWM") - before)

torch.set_num_threads(1)
for case in json.loads(sys.argv[2]):
    if os.fork() == 0:
        print(peak(*case))
        break
    os.wait()
"""
"""Prints the peak of each case, in a fork of what has imported the libraries."""


def write_model(directory: Path, vocabulary: int, dtype: str) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_file=str(Path(__file__).parents[1] / "support" / "tiny_tokenizer.json")
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Return the model and the peak of each case."""
    root = tmp_path_factory.mktemp("peaks")
    models = {dtype: write_model(root / dtype, 32_768, dtype) for _, dtype in CASES[:2]}
    cases = [(kind, str(models[dtype]), str(write_model(root / "tiny" / dtype, 512, dtype))) for kind, dtype in CASES]
    command = [sys.executable, "-c", MEASURE, str(WINDOW), json.dumps(cases)]
    with warm_pythons():
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return [(models[dtype], int(peak)) for (_, dtype), peak in zip(CASES, said, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("case", range(len(CASES)), ids=map("-".join, CASES))
def test_the_peak_of_an_eval_is_what_was_said(case: int, peaks: list[tuple[Path, int]]) -> None:
    kind, (directory, measured) = CASES[case][0], peaks[case]
    model = SessionMemory(Checkpoint(directory).shape, "cpu")
    measured_eval = (
        Perplexity(dataset="c4", window=WINDOW) if kind == "perplexity" else Divergence(dataset="c4", window=WINDOW)
    )
    said = measured_eval.predict(model, model if kind == "divergence" else None).ram_bytes
    assert 0.8 <= said / measured <= 1.5, f"{said:,} said, {measured:,} measured"


@pytest.fixture
def memory(tmp_path: Path) -> SessionMemory:
    return SessionMemory(Checkpoint(write_model(tmp_path, 4096, "float32")).shape, "cpu")


def test_what_an_eval_adds_is_the_logits_of_a_window(memory: SessionMemory) -> None:
    logits = 4 * 4096
    by_window = [Perplexity(dataset="c4", window=window).predict(memory).ram_bytes for window in (256, 512)]
    forward = memory.forward(1, 512) - memory.forward(1, 256)
    assert by_window[1] - by_window[0] == 256 * logits + forward
    assert (
        Divergence(dataset="c4", window=512).predict(memory, memory).ram_bytes
        > by_window[1] + memory.weights + 512 * logits
    )


def test_keys_and_values_grow_with_batch_and_length(memory: SessionMemory) -> None:
    assert memory.cache(1, 1) == 2 * 2 * 2 * 32 * 4  # keys and values, blocks, heads, size, bytes
    assert memory.cache(3, 5) == 15 * memory.cache(1, 1)
    small, large = (Throughput(batch_sizes=(batch,)).predict(memory).ram_bytes for batch in (1, 8))
    assert large > small


def test_on_a_gpu_the_logits_lie_there(memory: SessionMemory) -> None:
    there = replace(memory, device="cuda")
    cost = Perplexity(dataset="c4", window=512).predict(there)
    assert cost.ram_bytes == memory.shape.size_bytes
    assert cost.gpu_bytes == memory.shape.size_bytes + there.forward(1, 512) + 512 * 4 * 4096 + SLICE_BYTES


@pytest.mark.parametrize(("bits", "floats"), [(4, 2), (8, 0)])
def test_prompts_are_multiplied_by_floats_of_packed_experts(
    tiny_model: TinyModel, tmp_path: Path, bits: int, floats: int
) -> None:
    source = tiny_model("mixtral")
    (tmp_path / "recipe.yaml").write_text(
        f"model: {source}\nstages: [cast: bfloat16, rtn: {{bits: {bits}, group_size: 32}}, cuda_graphs]\n"
    )
    plan = make_plan(load_recipe(tmp_path / "recipe.yaml").pinned(None), Store(tmp_path), "cuda")
    settings, config = plan.recipe.settings, json.loads((source / "config.json").read_text())
    there, plain = (session_memory(plan.steps[-1], each, "cuda") for each in (settings, ()))
    gate_and_up = 2 * config["num_local_experts"] * config["intermediate_size"] * config["hidden_size"]
    assert there.forward(1, 128) == plain.forward(1, 128)
    assert there.forward(1, 129) == plain.forward(1, 129) + floats * gate_and_up
    assert not session_memory(plan.steps[-1], settings, "cpu").graphs


def test_a_dtype_that_a_setting_asks_for_halves_the_weights(memory: SessionMemory) -> None:
    assert replace(memory, dtype="bfloat16").weights == memory.weights // 2


def test_an_export_keeps_the_logits_that_it_is_compared_on() -> None:
    config = {"vocab_size": 262_144, "max_position_embeddings": 32_768, "sliding_window": 512}
    shape = ModelShape(config, {"embedding": TensorInfo("BF16", (262_144, 640))})
    assert compared_shapes(32_768, 512)[-1] == (1, 544)
    row, kept, longest = 4 * 262_144, 1 + 7 + 66 + 192 + 544, 544
    assert comparing_bytes(shape, 0, 1000, rounds=False) == 1000 + row * (kept + 3 * longest)
    assert comparing_bytes(shape, 0, 1000, rounds=True) == 1000 + row * (2 * kept + 3 * longest)
    assert comparing_bytes(shape, 10**12, 1000, rounds=True) == 10**12 + row * kept
