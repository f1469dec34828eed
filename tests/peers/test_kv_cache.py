"""vLLM takes the float8 cache and its scales from an artifact by itself; OPTKIT_VLLM_PYTHON names
an interpreter that has vllm.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from optkit.model.checkpoint import Checkpoint
from optkit.model.kv_scales import split_kv_scales
from optkit.source.calibration import Calibration
from optkit.stages.kv_scales import KvScales
from optkit.stages.rtn import Rtn
from tests.support.running import run_stage

PYTHON = os.environ.get("OPTKIT_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="set OPTKIT_VLLM_PYTHON to an interpreter"),
]
PROGRAM = """
import json, sys

def scales(model):
    layers = [module for module in model.modules() if hasattr(module, "_k_scale_float")]
    return [(layer._k_scale_float, layer._v_scale_float, layer.kv_cache_dtype) for layer in layers]

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    model = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=512, enforce_eager=True)
    (layers,) = model.apply_model(scales)
    answers = model.generate(["The capital of France is"], SamplingParams(max_tokens=24, temperature=0))
    open(sys.argv[2], "w").write(json.dumps({"layers": layers, "text": answers[0].outputs[0].text}))
"""


@pytest.mark.parametrize("weights", ["float", "packed"])
def test_vllm_reads_the_scales_and_writes_sensible_text(smol: Path, tmp_path: Path, weights: str) -> None:
    source, target = smol, tmp_path / "scaled"
    if weights == "packed":
        source = tmp_path / "packed"
        run_stage(Rtn(group_size=32), smol, source)
    run_stage(
        KvScales(calibration=Calibration(dataset="python-reference", samples=8, sequence_length=256)), source, target
    )
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [PYTHON, str(tmp_path / "program.py"), str(target), str(tmp_path / "said.json")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = json.loads((tmp_path / "said.json").read_text())
    _, stored = split_kv_scales(Checkpoint(target))
    assert stored is not None
    assert [layer[2] for layer in said["layers"]] == ["fp8"] * len(stored.keys)
    assert [layer[0] for layer in said["layers"]] == pytest.approx(stored.keys, rel=1e-2)
    assert [layer[1] for layer in said["layers"]] == pytest.approx(stored.values, rel=1e-2)
    assert "Paris" in said["text"]
