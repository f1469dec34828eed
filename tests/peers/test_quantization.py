"""What other programs make of packed directories: gptqmodel's logits and vLLM's text, each in its
own environment.

Set OPTKIT_PEERS_PYTHON (an interpreter with gptqmodel) and OPTKIT_VLLM_PYTHON (one with vLLM) to
run these.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from optkit.algorithms.packing import pack, unpack_gptq
from optkit.model.checkpoint import Checkpoint
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.running import run_stage

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

GPTQMODEL_LOGITS = """
import sys, torch
from gptqmodel import GPTQModel
from gptqmodel.utils.backend import BACKEND
model = GPTQModel.load(sys.argv[1], device="cpu", dtype=torch.bfloat16, backend=BACKEND.TORCH)
kinds = {type(module).__name__ for module in model.model.modules()}
assert "TorchLinear" in kinds, kinds
with torch.no_grad():
    torch.save(model.model(input_ids=torch.arange(100, 140)[None]).logits.float(), sys.argv[2])
"""
GPTQMODEL_PACK = """
import sys, torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.backend import BACKEND
given = torch.load(sys.argv[1])
outputs, inputs = given["weight"].shape
layer = TorchLinear(bits=given["bits"], group_size=32, sym=False, desc_act=False, in_features=inputs,
    out_features=outputs, bias=False,
                    pack_dtype=torch.int32, backend=BACKEND.TORCH, adapter=None, register_buffers=True)
linear = torch.nn.Linear(inputs, outputs, bias=False)
linear.weight.data = given["weight"]
layer.pack_original(linear, given["scales"], given["zeros"], torch.arange(inputs, dtype=torch.int32) // 32)
torch.save({"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}, sys.argv[2])
"""
VLLM_TEXT = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    model = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=512, enforce_eager=True)
    answers = model.generate(["The capital of France is"], SamplingParams(max_tokens=24, temperature=0))
    open(sys.argv[2], "w").write(json.dumps(answers[0].outputs[0].text))
"""


@pytest.fixture(scope="session")  # before that of the real model, which takes 20 s
def peers() -> str:
    return interpreter("OPTKIT_PEERS_PYTHON")


@pytest.fixture(scope="session")
def vllm() -> str:
    return interpreter("OPTKIT_VLLM_PYTHON")


def interpreter(variable: str) -> str:
    """Return what an environment variable names; skips without."""
    return os.environ.get(variable) or pytest.skip(f"set {variable} to an interpreter")


def run(python: str, program: str, directory: Path, *arguments: Path) -> None:
    """Run a program with an interpreter."""
    (directory / "program.py").write_text(program, encoding="utf-8")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [python, str(directory / "program.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bytes_equal_gptqmodel(peers: str, bits: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (64, 96), generator=generator)
    zeros = torch.randint(1, 1 << bits, (64, 3), generator=generator)
    scales = torch.rand(64, 3, generator=generator).half().float() + 0.5
    weight = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    torch.save({"weight": weight, "scales": scales, "zeros": zeros.float(), "bits": bits}, tmp_path / "given.pt")
    run(peers, GPTQMODEL_PACK, tmp_path, tmp_path / "given.pt", tmp_path / "packed.pt")
    theirs = torch.load(tmp_path / "packed.pt")
    assert torch.equal(theirs["qweight"], pack(codes.to(torch.uint8), bits, 1).T)
    # in memory it does not subtract the one
    assert torch.equal(theirs["qzeros"], pack(zeros.T.to(torch.uint8), bits, 1))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"group_size": 32}),
        ("llama", {"bits": 3, "group_size": 32}),
        ("llama", {"bits": 2, "group_size": 16, "exclude": ("*.0.mlp.*",)}),
        ("qwen2", {"bits": 8, "group_size": None}),
        ("gpt2", {}),
    ],
)
def test_gptqmodel_gives_the_same_logits(
    peers: str, tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    source, packed = tiny_model(kind), tmp_path / "packed"
    run_stage(Rtn(format="gptq", **fields), source, packed)
    run(peers, GPTQMODEL_LOGITS, tmp_path, packed, tmp_path / "logits.pt")
    theirs = torch.load(tmp_path / "logits.pt")
    checkpoint = Checkpoint(packed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name in [name.removesuffix(".qweight") for name in checkpoint.tensors if name.endswith(".qweight")]:
        tensors = {leaf: checkpoint.read(f"{name}.{leaf}") for leaf in ("qweight", "qzeros", "scales", "g_idx")}
        weight = unpack_gptq(tensors, fields.get("bits", 4)).dequantize().float()
        model.get_submodule(name).weight.data.copy_(weight.T if kind == "gpt2" else weight)
    with torch.no_grad():
        ours = model(torch.arange(100, 140)[None]).logits
    assert (ours - theirs).norm() / ours.norm() < 0.02  # bfloat16 there, float32 here


MIXED = {
    "*.down_proj": {"group_size": 64},
    "model.layers.0.*": "keep",
    "model.layers.3.self_attn.*": {"group_size": 64},
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"symmetric": False, "group_size": 32},
        {"format": "gptq", "group_size": 32},
        {"overrides": MIXED, "group_size": 32},
        {"lm_head": True},
        {"lm_head": True, "overrides": {"lm_head": {"group_size": 32}}},
    ],
)
def test_vllm_writes_sensible_text(vllm: str, smol: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    packed = tmp_path / "packed"
    run_stage(Rtn(**fields), smol, packed)
    run(vllm, VLLM_TEXT, tmp_path, packed, tmp_path / "text.json")
    assert "Paris" in json.loads((tmp_path / "text.json").read_text())


def test_vllm_refuses_layers_that_it_joins_in_two_forms(vllm: str, smol: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    report = run_stage(Rtn(overrides={"model.layers.0.self_attn.q_proj": {"group_size": 32}}), smol, packed)
    assert "vLLM joins model.layers.0.self_attn.q_proj with k_proj, v_proj" in report.notes[0]
    with pytest.raises(AssertionError, match="load_qkv_weight"):
        run(vllm, VLLM_TEXT, tmp_path, packed, tmp_path / "text.json")
