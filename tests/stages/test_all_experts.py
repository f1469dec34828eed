"""Calibration that shows every token to every expert (`calibration: {experts: all}`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.algorithms.gptq import gptq_together as whole
from optkit.algorithms.hessian import Hessian
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.experts import Expert, experts_in, seeing_all
from optkit.model.skeleton import Skeleton
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.quantizing import compensation, stacks
from optkit.stages.quantizing.hessians import collect_hessians, read_text
from tests.support.near import near

TOKENS = 3 * 64
ALL = Calibration(dataset="python-reference", samples=3, sequence_length=64, experts="all")
ROUTED = ALL.model_copy(update={"experts": "routed"})
KINDS = ["mixtral", "qwen2_moe", "qwen3_next"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_hessian_of_each_expert_counts_every_token(kind: str, tiny_model: Any) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model(kind)))
    inputs = skeleton.capture_inputs(read_text(skeleton, ALL, Context(), "gptq"), "cpu", 2)
    index = len(skeleton.blocks) - 1
    block = skeleton.blocks[index]
    skeleton.load_(block.name, "cpu")
    (experts,) = experts_in(block.module)
    entered: list[torch.Tensor] = []
    with experts.register_forward_pre_hook(lambda module, given: entered.append(given[0])):
        skeleton.advance_(index, replace(inputs, hidden=inputs.hidden.clone()))
    layers = {name: module for name, module in skeleton.linears(block).items() if ".experts." in name}
    found = collect_hessians(skeleton, index, inputs, layers, equal_tokens=True)
    assert set(found) == set(layers)
    assert {hessian.tokens for hessian in found.values()} == {TOKENS}
    assert len({id(found[name]) for name in layers if not name.endswith(experts[0].down_name)}) == 1
    for number, expert in enumerate(experts):
        assert isinstance(expert, Expert)
        given = torch.cat(entered)
        joined = torch.cat([expert.get_submodule(name)(given) for name in expert.input_names], -1)
        for leaf, rows in ((expert.input_names[0], given), (expert.down_name, expert.gate(joined))):
            expected = Hessian(rows.shape[-1])
            expected.add(rows)
            (name,) = [each for each in layers if each.endswith(f".experts.{number}.{leaf}")]
            assert near(found[name].matrix(), expected.matrix(), 5e-3), "bfloat16 at the most"
    assert not experts.see_all


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_the_router_sends_enters_the_output(kind: str, tiny_model: Any) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model(kind)))
    inputs = skeleton.capture_inputs(read_text(skeleton, ROUTED, Context(), "gptq"), "cpu", 3)
    index = len(skeleton.blocks) - 1
    skeleton.load_(skeleton.blocks[index].name, "cpu")
    (batch,) = inputs.batches
    routed = skeleton.run_block(index, inputs.hidden, batch.calls[index])
    with seeing_all(experts_in(skeleton.model)):
        assert near(skeleton.run_block(index, inputs.hidden, batch.calls[index]), routed)
    assert torch.equal(skeleton.run_block(index, inputs.hidden, batch.calls[index]), routed)


def test_no_expert_is_rounded_to_nearest_and_the_report_counts_their_tokens(tiny_model: Any, tmp_path: Path) -> None:
    reports = {}
    for text in (ROUTED, ALL):
        (target := tmp_path / text.experts).mkdir()
        reports[text.experts] = Gptq(calibration=text).run(tiny_model("mixtral"), target, Context())
    routed, every = (reports[name].details for name in ("routed", "all"))
    assert routed["rounded_to_nearest"]
    assert not every["rounded_to_nearest"]
    assert every["expert_tokens"] == {
        f"model.layers.{index}.block_sparse_moe.experts": [TOKENS] * 4 for index in range(2)
    }
    assert [sum(tokens) for tokens in routed["expert_tokens"].values()] == [2 * TOKENS] * 2
    for name, tokens in routed["rounded_to_nearest"].items():
        holder, _, rest = name.partition(".experts.")
        assert routed["expert_tokens"][f"{holder}.experts"][int(rest.partition(".")[0])] == tokens
    assert open_session(tmp_path / "all").logits(torch.arange(8)[None]).isfinite().all()


def test_experts_that_are_rounded_together_have_the_codes_that_each_has_alone(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ROUTED.model_copy(update={"samples": 9})
    found, calls = [], []
    monkeypatch.setattr(compensation, "gptq_together", lambda *given: (calls.append(len(given[0])), whole(*given))[1])
    for most in (1, 1 << 20):
        monkeypatch.setattr(stacks, "EXPERTS_AT_ONCE", {"cpu": most, "cuda": most})
        (target := tmp_path / str(most)).mkdir()
        losses = Gptq(calibration=text).run(tiny_model("mixtral"), target, Context()).details["losses"]
        found.append((Checkpoint(target), losses, max(calls, default=0)))
    (alone, expected, none), (ours, losses, several) = found
    assert none == 0
    assert several > 1
    assert losses == {name: pytest.approx(loss, rel=0.05) for name, loss in expected.items()}
    # a tie that falls the other way changes what the blocks behind are given
    first = [name for name in ours.tensors if "layers.0" in name]
    same = [(ours.read(name) == alone.read(name)).float().mean() for name in first]
    assert sum(same) / len(same) > 0.99


def test_of_experts_that_are_rounded_together_the_one_that_fails_is_named(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no damping mends it")

    rounded = iter([*[compensation.gptq] * 3, fails])
    monkeypatch.setattr(compensation, "gptq_together", fails)
    monkeypatch.setattr(compensation, "gptq", lambda *given: next(rounded)(*given))
    with pytest.raises(StageError, match=r"layers.0.*experts.2.*: no damping mends it. Exclude the layer, or cal"):
        Gptq(calibration=ALL, include=("*.experts.*",)).run(tiny_model("mixtral"), tmp_path, Context())


@pytest.mark.parametrize(
    "stage",
    [
        Awq(calibration=ALL, group_size=32, symmetric=True),
        Prune(calibration=ALL, method="sparsegpt", sparsity=0.5),
        Fp8(calibration=ALL, rounding="gptq"),
    ],
    ids=lambda stage: stage.kind,
)
def test_every_stage_that_watches_layers_takes_it(stage: Any, tiny_model: Any, tmp_path: Path) -> None:
    (target := tmp_path / "target").mkdir()
    details = stage.run(tiny_model("qwen2_moe"), target, Context()).details
    few = ("rounded_without_inputs", "pruned_by_magnitude", "calibrated_as_others", "rounded_to_nearest")
    assert not any(map(details.get, few))


@pytest.mark.parametrize(("kind", "why"), [("llama", "It is dense"), ("gpt_oss", "more than their matrices")])
def test_a_model_without_experts_that_can_is_refused(kind: str, why: str, tiny_model: Any, tmp_path: Path) -> None:
    message = (
        rf"^gptq\.calibration\.experts: the model has no experts that could see all tokens\. .*{why}.*Leave it out"
    )
    with pytest.raises(StageError, match=message):
        Gptq(calibration=ALL, group_size=16).run(tiny_model(kind), tmp_path, Context())
    message = message.replace(r"^gptq\.", "^").replace("more than their matrices", "stores its experts joined")
    with pytest.raises(StageError, match=message):
        Gptq(calibration=ALL, group_size=16).predict(Checkpoint(tiny_model(kind)).shape, "cpu")


def test_stages_that_watch_no_expert_and_other_libraries_refuse_it() -> None:
    with pytest.raises(
        ValueError, match="calibration.experts: auto_bits shows an expert only what the router .* it. Leave it out"
    ):
        AutoBits(average_bits=4.5, calibration=ALL)
    with pytest.raises(
        ValueError, match="experts: llmcompressor shows an expert only what .* it. Leave it out, or take"
    ):
        Gptq(backend="llmcompressor", calibration=ALL)


def test_the_default_is_in_no_key() -> None:
    assert "experts" not in ROUTED.model_dump(mode="json")
    assert ALL.model_dump(mode="json")["experts"] == "all"
