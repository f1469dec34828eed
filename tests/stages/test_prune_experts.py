"""Stage `prune_structured` with fewer experts: the right ones stay, and what is left opens as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from optkit.common.frozen import described, restored
from optkit.errors import StageError
from optkit.model import fewer_experts
from optkit.model.checkpoint import Checkpoint
from optkit.model.inventory import take_inventory
from optkit.model.weights import expert_counts
from optkit.recipe.field_faults import validate
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stages.narrowing import experts as removing
from optkit.stages.prune_structured import PruneStructured
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.running import run_stage
from tests.support.smaller_models import letters, pruned, refused
from tests.zoo.models import TOKENS, plain_logits, save_model

KINDS: dict[str, dict[str, int]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "minimax_m2": {},
    "granitemoe": {},
    "nemotron_h": {"moe_latent_size": 32},
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*((kind, {}) for kind in KINDS), *((kind, {"merge": True}) for kind in ("gpt_oss", "granitemoe", "nemotron_h"))],
)
def test_what_is_left_opens_and_computes_the_same_in_plain_transformers(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    source, target = save_model(kind, tmp_path / "source", **KINDS[kind]), tmp_path / "target"
    report = pruned(source, target, experts=0.75, calibration=letters(tmp_path), **fields)
    assert expert_counts(json.loads((target / "config.json").read_text())) == (3, 2)
    assert report.details["largest_difference"] < 1e-4
    assert {len(each) for each in report.details["kept_experts"].values()} == {3}
    assert near(open_session(target).logits(TOKENS), plain_logits(target))
    before, after = Checkpoint(source).shape, Checkpoint(target).shape
    assert not take_inventory(before, after, report.dropped).lost


def test_those_stay_whose_weighted_outputs_are_longest(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, target = tiny_model("mixtral"), tmp_path / "target"
    text = letters(tmp_path)
    report = pruned(source, target, experts=2, calibration=text)
    assert report.changed == 2
    tokens = Calibration(**text).tokens(source, None)
    scores = saliencies(source, tokens)
    tensors, left = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    for index, score in enumerate(scores):
        block, experts = f"model.layers.{index}", f"model.layers.{index}.block_sparse_moe.experts"
        assert near(report.details["expert_scores"][block], score, share=1e-4)
        assert sum(report.details["expert_tokens"][block]) == 2 * tokens.numel()
        kept = sorted(score.argsort(descending=True)[:2].tolist())
        assert report.details["kept_experts"][block] == kept
        for new, old in enumerate(kept):
            for leaf in ("w1", "w2", "w3"):
                assert torch.equal(left[f"{experts}.{new}.{leaf}.weight"], tensors[f"{experts}.{old}.{leaf}.weight"])
        router = f"model.layers.{index}.block_sparse_moe.gate.weight"
        assert torch.equal(left[router], tensors[router][kept])


def saliencies(source: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return REAP's score of each expert of a Mixtral, by its formula and transformers' own routers."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager")
    found = []

    def score(experts: Any, given: tuple[Any, ...]) -> None:
        hidden, chosen, weights = given
        made = torch.zeros(len(experts.down_proj))
        for index, (both, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            gate, up = (hidden @ both.T).chunk(2, -1)
            lengths = ((nn.functional.silu(gate) * up) @ down.T).norm(dim=-1)
            routed = chosen == index
            made[index] = (weights * routed).sum(-1) @ lengths / routed.any(-1).sum()
        found.append(made)

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(score)
    with torch.no_grad():
        model(tokens)
    return found


def test_experts_are_added_to_those_that_make_most_nearly_the_same(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removing, "SAMPLE", 1 << 20)  # all tokens
    source, target, text = tiny_model("mixtral"), tmp_path / "target", letters(tmp_path)
    report = pruned(source, target, experts=2, calibration=text, merge=True)
    tokens = Calibration(**text).tokens(source, None)
    tensors, left = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    for index, outputs in enumerate(mean_outputs(source, tokens)):
        block, experts = f"model.layers.{index}", f"model.layers.{index}.block_sparse_moe.experts"
        kept, seen = report.details["kept_experts"][block], report.details["expert_tokens"][block]
        groups: dict[int, list[int]] = {each: [each] for each in kept}
        for expert in sorted({*range(4)} - {*kept}):
            groups[min(kept, key=lambda each: float((outputs[each] - outputs[expert]).norm()))].append(expert)
        assert report.details["merged_experts"][block] == [*groups.values()]
        for new, group in enumerate(groups.values()):
            for leaf in ("w1", "w2", "w3"):
                shares = torch.tensor([seen[each] for each in group]).double() / sum(seen[each] for each in group)
                weights = torch.stack([tensors[f"{experts}.{each}.{leaf}.weight"].double() for each in group])
                wanted = torch.einsum("g,goi->oi", shares, weights).float()
                torch.testing.assert_close(left[f"{experts}.{new}.{leaf}.weight"], wanted, rtol=1e-5, atol=1e-6)
    assert near(open_session(target).logits(TOKENS), plain_logits(target))
    assert {*report.dropped.values()} == {"an expert that was added to another"}


def mean_outputs(source: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return what each expert of a Mixtral makes of all tokens, in the mean, by transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager")
    found = []

    def made(experts: Any, given: tuple[Any, ...]) -> None:
        outputs = []
        for both, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            gate, up = (given[0] @ both.T).chunk(2, -1)
            outputs.append(((nn.functional.silu(gate) * up) @ down.T).mean(0))
        found.append(torch.stack(outputs))

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(made)
    with torch.no_grad():
        model(tokens)
    return found


def test_experts_are_merged_only_if_some_go() -> None:
    with pytest.raises(ValidationError, match="merge says what becomes of experts: set experts too"):
        PruneStructured(remove_layers=1, merge=True)


def test_a_token_is_sent_to_no_more_experts_than_there_are(tmp_path: Path) -> None:
    source = save_model("mixtral", tmp_path / "source", num_experts_per_tok=3)
    pruned(source, tmp_path / "two", experts=2, calibration=letters(tmp_path))
    assert expert_counts(json.loads((tmp_path / "two" / "config.json").read_text())) == (2, 2)
    assert near(open_session(tmp_path / "two").logits(TOKENS), plain_logits(tmp_path / "two"))


def test_a_router_that_chooses_others_is_an_error(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = removing._left_of
    monkeypatch.setattr(removing, "_left_of", lambda stored, name, *more: cut(stored, name, *more).flip(0))
    with pytest.raises(StageError, match="the smaller model sends tokens to other experts"):
        pruned(tiny_model("mixtral"), tmp_path / "target", experts=3, calibration=letters(tmp_path))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {}, "prune_structured.experts: the model has no experts that config.json counts"),
        ("mixtral", {"experts": 4}, "4 of 4 experts leaves 4. Take 2 to 3, or a fraction between"),
        ("mixtral", {"experts": 0.3}, "0.3 of 4 experts leaves 1. Take 2 to 3, or a fraction between"),
    ],
)
def test_what_cannot_go_is_refused_before_it_runs(
    kind: str, fields: dict[str, Any], message: str, tiny_model: TinyModel
) -> None:
    assert message in refused(tiny_model(kind), **{"experts": 2, **fields})


def test_groups_of_experts_are_refused(tmp_path: Path) -> None:
    source = save_model("deepseek_v3", tmp_path / "source", n_group=2, topk_group=1)
    assert "the experts are chosen from 2 groups. Every group would have to keep as many" in refused(source, experts=2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama4_text", "nobody can tell what each expert adds. Each is called with all tokens, times the router's"),
        ("jetmoe", "nobody can tell what each expert adds. They are called with the tokens of all of them in one"),
        (
            "inkling_text",
            "the router model.layers.0.mlp.gate has 5 outputs for 4 experts. It chooses from more than these",
        ),
    ],
)
def test_experts_without_a_module_for_the_routers_choice_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    assert message in refused(save_model(kind, tmp_path / "source"), experts=2)


def test_experts_of_other_code_are_refused_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fewer_experts, "CALLED_OTHERWISE", {})
    source = save_model("llama4_text", tmp_path / "source")
    unread = Calibration(dataset=str(tmp_path / "none.txt"))
    stage = PruneStructured(experts=2, calibration=unread)
    with pytest.raises(StageError, match="are not called as one with the router's choice"):
        run_stage(stage, source, tmp_path / "target")


def test_experts_go_by_themselves() -> None:
    faults = validate(PruneStructured, {"experts": 2, "remove_layers": 1})
    assert isinstance(faults, list)
    assert "experts go by themselves" in str(faults[0])
    faults = validate(PruneStructured, {"experts": 1.5})
    assert isinstance(faults, list)
    assert "1.5 is no fraction between 0 and 1" in str(faults[0])
    faults = validate(PruneStructured, {"experts": 2, "compensate": False, "multiple_of": 8})
    assert isinstance(faults, list)
    assert "compensate and multiple_of would not be read: whole experts go" in str(faults[0])


@pytest.mark.parametrize("fields", [{"experts": 2}, {"kv_heads": 1}, {"remove_layers": (0,)}])
def test_a_stage_whose_defaults_are_written_down_is_the_same(fields: dict[str, Any]) -> None:
    stage = PruneStructured(**fields)
    assert restored(described(stage)) == stage


def test_a_recipe_without_the_field_keeps_its_key() -> None:
    assert "experts" not in PruneStructured(remove_layers=1).model_dump(mode="json")
