import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from optkit_evals.serving import refuse_other_engines
from optkit_evals.throughput import Throughput

from optkit.devices.datasheets import datasheet
from optkit.errors import EvalError, OptkitError, RecipeError, SourceError, StageError
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.split_plan import stored_plan
from optkit.pipeline import open_artifact, plan, run
from optkit.recipe.recipe import load_recipe
from optkit.reports.profiling.run import _check
from optkit.reports.roofline.limits import session_limits
from optkit.reports.roofline.work import work_of
from optkit.session import open_session
from optkit.session.parallel_session import ParallelSession
from optkit.settings import tensor_parallel
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.settings.offload import Offload
from optkit.settings.speculative import Speculative
from optkit.settings.tensor_parallel import TensorParallel
from optkit.source.models import ModelSource, model_shape
from optkit.stage import Setting
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.quick_evals import THROUGHPUT
from tests.support.waiting import ended
from tests.support.warm import warm_pythons

TOKENS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))
TWO = TensorParallel(devices=2)


@pytest.fixture(scope="module")
def split_llama(tiny_model: TinyModel) -> Iterator[ParallelSession]:
    with warm_pythons():
        session = open_session(tiny_model("llama"), [TWO])
    assert isinstance(session, ParallelSession)
    yield session
    session.close()


def test_two_processes_compute_what_one_does(tiny_model: TinyModel, split_llama: ParallelSession) -> None:
    alone: Any = open_session(tiny_model("llama"))
    assert near(split_llama.logits(TOKENS), alone.logits(TOKENS), 1e-4)
    assert split_llama.generate(TOKENS, 6).equal(alone.generate(TOKENS, 6))
    assert (split_llama.vocabulary, split_llama.positions, split_llama.dtype) == (512, 512, "float32")
    assert split_llama.notes == ("tensor_parallel: 2 processes by gloo, 289 kB of weights on each",)
    assert split_llama.attention_kernels(TOKENS) == alone.attention_kernels(TOKENS)
    norms = 7 * 64 * 4  # every process has the norms, all of their weights
    # and the frequencies of the rotary embedding
    assert split_llama.decode_bytes(2, 10) == alone.decode_bytes(2, 10) + norms + 64
    assert split_llama.encode("hello").equal(alone.encode("hello"))


def test_an_answer_that_is_not_read_to_its_end_disturbs_nothing(split_llama: ParallelSession) -> None:
    whole = split_llama.generate(TOKENS, 4)
    next(iter(split_llama.stream(TOKENS, 4)))
    assert split_llama.generate(TOKENS, 4).equal(whole)


def test_what_is_asked_in_vain_is_an_error_as_ever(split_llama: ParallelSession) -> None:
    with pytest.raises(EvalError, match=r"600 tokens are more than the model's 512 positions"):
        split_llama.logits(torch.zeros(1, 600, dtype=torch.int64))
    assert split_llama.logits(TOKENS).isfinite().all()


def test_what_needs_the_model_in_this_process_is_refused(split_llama: ParallelSession) -> None:
    with pytest.raises(EvalError, match=r"split over several devices\. torch\.profiler sees this process alone"):
        _check(split_llama, 4, 2, nvtx=False)
    with pytest.raises(EvalError, match=r"continuous batching does not apply to this session"):
        refuse_other_engines(split_llama)


def test_throughput_reports_the_memory_of_all_processes(split_llama: ParallelSession) -> None:
    grid, context = Throughput(prompts=(8,), new_tokens=3, repeats=2, warmup=1, limit_s=1), EvalContext()
    rows = {metric.name: metric.value for metric in grid.run(split_llama, context)}
    resident = sum(psutil.Process(child.process.pid).memory_info().rss for child in split_llama._ranks._children)
    assert rows["peak_memory_bytes"] == pytest.approx(resident, rel=0.2)
    assert any("the peak of memory was" in note and "in the processes" in note for note in context.notes)
    assert rows["decode_bytes_per_s"] / rows["decode_tokens_per_s"] == pytest.approx(split_llama.decode_bytes(1, 9))


def test_the_roof_of_two_gpus_is_twice_as_high(tiny_model: TinyModel, split_llama: ParallelSession) -> None:
    work = work_of(model_shape(ModelSource(name=str(tiny_model("llama"))), tiny_model("llama")))
    one = session_limits(split_llama, work, datasheet("h200"), 1, 8, 8)[1].seconds
    split_llama.devices = ("cuda:0", "cuda:1")
    two = session_limits(split_llama, work, datasheet("h200"), 1, 8, 8)[1].seconds
    split_llama.devices = ("cpu", "cpu")
    assert one == pytest.approx(2 * two)


@pytest.mark.usefixtures("warm_children")
def test_biases_and_a_cache_of_codes_and_a_process_that_dies(tiny_model: TinyModel) -> None:
    cache = KvCache(dtype="int8")
    alone: Any = open_session(tiny_model("qwen2"), [cache])
    split: Any = open_session(tiny_model("qwen2"), [cache, TWO])
    assert near(split.logits(TOKENS), alone.logits(TOKENS), 1e-4)
    assert split.generate(TOKENS, 5).equal(alone.generate(TOKENS, 5))
    os.kill(split._ranks._children[1].process.pid, signal.SIGKILL)
    with pytest.raises(StageError, match=r"^tensor_parallel: process 2 of 2 \(cpu\) was ended by SIGKILL"):
        split.logits(TOKENS)


@pytest.mark.slow
def test_the_ranks_own_error_is_the_users(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        open_session(_without_weights(tiny_model("llama"), tmp_path), [TWO])


def _without_weights(model: Path, place: Path) -> Path:
    from tests.support.changes import changed_copy, without

    return changed_copy(model, place, without("model.layers.0.mlp.up_proj.weight"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma", "gemma3", "mixtral", "qwen2_moe"])
def test_other_architectures(tiny_model: TinyModel, kind: str) -> None:
    alone: Any = open_session(tiny_model(kind))
    split: Any = open_session(tiny_model(kind), [TWO])
    assert near(split.logits(TOKENS), alone.logits(TOKENS), 1e-4)
    assert split.generate(TOKENS, 5).equal(alone.generate(TOKENS, 5))
    split.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [(), (Compile(),), (Compile(mode="reduce-overhead"),)], ids=["plain", "compile", "graphs"]
)
def test_two_gpus_compute_what_one_does(tiny_model: TinyModel, settings: tuple[Setting, ...]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    alone: Any = open_session(tiny_model("llama"), (), "cuda")
    split: Any = open_session(tiny_model("llama"), [TWO, *settings], "cuda")
    assert split.devices == ("cuda:0", "cuda:1")
    logits = split.logits(TOKENS)
    assert logits.device == torch.device("cuda:0")
    assert near(logits, alone.logits(TOKENS), 1e-3)
    assert split.generate(TOKENS, 6).equal(alone.generate(TOKENS, 6))
    grid, context = Throughput(prompts=(8,), new_tokens=3, repeats=2, warmup=1, limit_s=1), EvalContext()
    rows = {metric.name: metric.value for metric in grid.run(split, context)}
    assert 0 < rows["peak_memory_bytes"] <= rows["peak_reserved_bytes"]
    split.close()


@pytest.mark.gpu
def test_more_gpus_than_there_are(tiny_model: TinyModel) -> None:
    with pytest.raises(StageError, match=r"64 devices were asked for, from cuda on"):
        open_session(tiny_model("llama"), [TensorParallel(devices=64)], "cuda")


@pytest.mark.slow
def test_a_compiled_step_is_split_too(tiny_model: TinyModel) -> None:
    alone: Any = open_session(tiny_model("llama"))
    split: Any = open_session(tiny_model("llama"), [TWO, Compile(devices=("cpu",), fullgraph=True)])
    assert split.compiled
    assert split.generate(TOKENS, 5).equal(alone.generate(TOKENS, 5))
    assert "compile: no graph breaks" in split.notes
    split.close()
    assert "compile: no graph breaks" in split.notes


@pytest.mark.slow
def test_the_processes_end_with_their_parent(tiny_model: TinyModel) -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\nfrom optkit.session import open_session\n"
        "from optkit.settings.tensor_parallel import TensorParallel\n"
        f"session = open_session(Path({str(tiny_model('llama'))!r}), [TensorParallel(devices=2)])\n"
        "print(*(child.process.pid for child in session._ranks._children), flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert ended(*pids)


@pytest.mark.slow
def test_a_recipe_through_plan_and_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = {
        "model": str(tiny_model("qwen2")),
        "name": "split",
        "stages": [{"tensor_parallel": 2}],
        "evals": [THROUGHPUT, "footprint"],
    }
    planned = plan(load_recipe(recipe), device="cpu", store=tmp_path / "store")
    assert planned.forecasts == ("tensor_parallel: 346 kB of weights on each of 2 devices",)
    scorecard = run(load_recipe(recipe), out=tmp_path / "out", device="cpu", store=tmp_path / "store")
    assert scorecard.settings == ("tensor_parallel: 2 processes by gloo",)
    assert "tensor_parallel: 2 processes by gloo, 346 kB of weights on each" in scorecard.notes
    again: Any = open_artifact(tmp_path / "out", device="cpu")
    assert isinstance(again, ParallelSession)
    again.close()


def shape_of(directory: Path, **changed: Any) -> ModelShape:
    checkpoint = Checkpoint(directory)
    return ModelShape({**checkpoint.config, **changed}, checkpoint.tensors)


def test_the_plan_is_transformers_own(tiny_model: TinyModel) -> None:
    from transformers import AutoConfig

    for kind in ("llama", "qwen2", "gemma", "gemma3_text", "mixtral", "qwen2_moe", "phi3", "olmo2", "deepseek_v3"):
        theirs = type(AutoConfig.for_model(kind)).base_model_tp_plan
        # those a quantizer adds when it opens a model
        own = {name: style for name, style in theirs.items() if "feed_forward" not in name}
        assert stored_plan(kind) == own, kind
    for kind in ("gpt2", "opt", "gptj", "gpt_oss"):
        assert stored_plan(kind) == {}, kind
    assert stored_plan("no_such_model") is None
    assert stored_plan("../llama") is None


@pytest.mark.parametrize(
    ("kind", "devices", "changed", "message"),
    [
        ("llama", 2, {}, None),
        ("qwen2", 2, {}, None),
        ("mixtral", 2, {}, None),
        (
            "llama",
            4,
            {},
            r"^tensor_parallel: LlamaForCausalLM cannot be split over 4 devices: 2 key heads\. .*Set devices to 2\.$",
        ),
        (
            "qwen2",
            3,
            {},
            r"4 attention heads; 2 key heads; .*64 outputs of model\.layers\.\*\.mlp|4 attention heads; 2 key heads",
        ),
        ("llama", 3, {}, r"512 outputs of model\.embed_tokens"),
        (
            "llama",
            2,
            {"quantization_config": {"bits": 4}},
            r"^tensor_parallel: packed weights of this format or architecture cannot be split\. .*vLLM",
        ),
        (
            "gpt2",
            2,
            {},
            r"^tensor_parallel: transformers has no tensor parallel plan for GPT2LMHeadModel\. .*or use offload",
        ),
        ("gpt_oss", 2, {}, r"no tensor parallel plan for GptOssForCausalLM"),
    ],
)
def test_what_is_refused_before_anything_runs(
    tiny_model: TinyModel, kind: str, devices: int, changed: Mapping[str, Any], message: str | None
) -> None:
    setting = TensorParallel(devices=devices)
    if message is None:
        setting.check(shape_of(tiny_model(kind), **changed), "cpu")
    else:
        with pytest.raises(StageError, match=message):
            setting.check(shape_of(tiny_model(kind), **changed), "cpu")


@pytest.mark.parametrize(
    ("there", "device", "message"),
    [
        (
            1,
            "cuda",
            r"^tensor_parallel: 4 devices were asked for, from cuda on, and there is 1 here\. "
            r".*Take it out of the recipe",
        ),
        (3, "cuda", r"there are 3 here\. .*Set devices to at most 3"),
        (5, "cuda:2", r"from cuda:2 on, and there are 5 here\. .*Set devices to at most 3"),
        (4, "cuda", None),
    ],
)
def test_fewer_gpus_than_asked_for(there: int, device: str, message: str | None) -> None:
    setting = TensorParallel(devices=4)
    if message is None:
        setting.check_devices(device, there)
    else:
        with pytest.raises(StageError, match=message):
            setting.check_devices(device, there)


def test_a_machine_without_gpus_plans_for_another_one(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "visible_gpus", lambda: 0)
    TensorParallel(devices=2).check(shape_of(tiny_model("llama")), "cuda")


def test_a_model_that_is_too_large_even_so(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "visible_gpus", lambda: 2)
    monkeypatch.setattr(tensor_parallel, "gpu_memory_bytes", lambda device: 200_000)
    with pytest.raises(
        StageError, match=r"each of 2 devices would hold 289 kB of weights, and cuda has 200 kB\. Use more devices"
    ):
        TWO.check(shape_of(tiny_model("llama")), "cuda")


@pytest.mark.parametrize(
    ("other", "why"),
    [(Speculative(prompt_lookup=2), "follow one request token by token"), (Offload(), "where every weight lies")],
)
def test_settings_that_exclude_it(tiny_model: TinyModel, other: Setting, why: str) -> None:
    with pytest.raises(OptkitError, match=why):
        open_session(tiny_model("llama"), [other, TWO])
    kind = {"Speculative": {"speculative": {"prompt_lookup": 2}}, "Offload": "offload"}
    if named := kind.get(type(other).__name__):
        with pytest.raises(RecipeError, match="exclude each other"):
            load_recipe({"model": str(tiny_model("llama")), "stages": [named, {"tensor_parallel": 2}]})


def test_a_plan_nobody_knows_is_left_to_the_opening() -> None:
    shape = ModelShape({"model_type": "unheard_of"}, {"a.weight": TensorInfo("F32", (3, 3))})
    TWO.check(shape, "cpu")
    assert TWO.device_bytes(shape) == 36
    assert TWO.describe("cuda") == "tensor_parallel: 2 GPUs by nccl"
