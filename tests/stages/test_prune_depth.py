"""Stage `prune_structured` without some of the decoder blocks: what is left computes what it did,
and the right blocks go.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.recipe.field_faults import validate
from optkit.stage import Context
from optkit.stages.narrowing import proof as smaller_proof
from optkit.stages.prune_structured import PruneStructured
from tests.conftest import TinyModel
from tests.support.changes import change_json, changed_copy
from tests.support.live_memory import LiveBytes
from tests.support.running import run_stage
from tests.support.smaller_models import (
    MODELS,
    blocks_of,
    config_of,
    letters,
    letters_tokens,
    logits,
    made_model,
    model_of,
    pruned,
    refused,
    save_model,
)
from tests.zoo import models as zoo


@pytest.fixture(scope="module")
def llama() -> Path:
    return made_model("llama")


def skipping_(model: PreTrainedModel, removed: Sequence[int]) -> PreTrainedModel:
    """Let blocks hand on what they are given, in the form in which the model passes it from one to
    the next.
    """
    for index in removed:
        block = blocks_of(model)[index]
        block.forward = lambda hidden, *_, **__: hidden  # type: ignore[method-assign]
    return model


def loss(model: PreTrainedModel, tokens: Tensor) -> float:
    with torch.no_grad():
        return float(model(tokens, labels=tokens, use_cache=False).loss)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("llama_biases", "multi_head", "gemma")])
def test_what_is_left_computes_what_it_did(kind: str, tmp_path: Path) -> None:
    source = made_model(kind)
    report = pruned(source, tmp_path / "target", remove_layers=[4, 1])
    assert report.details["removed_layers"] == [1, 4]
    assert (report.changed, report.calibrated_on) == (2, ())
    smaller = model_of(tmp_path / "target")
    assert len(blocks_of(smaller)) == 4
    want = logits(skipping_(model_of(source), [1, 4]))
    assert torch.allclose(logits(smaller), want, atol=1e-5 * float(want.abs().max()))
    assert report.details["largest_difference"] < 1e-5


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gpt2", {"n_layer": 4}),
        (
            "qwen2",
            {
                "num_hidden_layers": 4,
                "max_window_layers": 2,
                "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
            },
        ),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
        ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1]}),
    ],
)
def test_config_says_what_is_left(kind: str, told: dict[str, Any], tmp_path: Path) -> None:
    pruned(made_model(kind), tmp_path / "target", remove_layers=[1, 4])
    config = config_of(tmp_path / "target")
    assert {key: config[key] for key in told} == told


def test_kinds_that_transformers_derives_from_the_index_are_written_out(tmp_path: Path) -> None:
    source = save_model("gemma3", tmp_path / "source")
    change_json(source / "config.json", lambda config: config.pop("layer_types"), sliding_window_pattern=3)
    pruned(source, tmp_path / "target", remove_layers=[0])
    assert (
        config_of(tmp_path / "target")["layer_types"]
        == (["sliding_attention", "full_attention", "sliding_attention"] * 2)[:5]
    )


def test_a_choice_leaves_the_only_block_with_attention(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("zamba2")
    for search in ("at_once", "one_by_one", "contiguous"):
        fields = {"remove_layers": 1, "layer_search": search, "calibration": letters(tmp_path)}
        report = run_stage(PruneStructured.model_validate(fields), source, tmp_path / search)
        (gone,) = report.details["removed_layers"]
        assert config_of(source)["layers_block_type"][gone] != "hybrid"


def test_a_block_that_shares_weights_stays(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"model.layers.1 shares weights with other blocks.*share nothing: 0"):
        pruned(tiny_model("zamba2"), tmp_path / "target", remove_layers=[1])


def test_what_differs_in_some_blocks_goes_with_them(tmp_path: Path) -> None:
    whole = zoo.save_model("gemma4_text", tmp_path / "whole")
    with pytest.raises(SourceError, match="gemma4_text has a second embedding, with 64 channels for each block"):
        pruned(whole, tmp_path / "refused", remove_layers=[0])
    source = zoo.save_model("gemma4_text", tmp_path / "source", hidden_size_per_layer_input=0)
    pruned(source, tmp_path / "target", remove_layers=[0])
    assert config_of(tmp_path / "target")["per_layer_config"] == {"0": {"head_dim": 512}}


def test_block_influence_is_that_of_the_paper(llama: Path, tmp_path: Path) -> None:
    report = pruned(llama, tmp_path / "target", remove_layers=0.34, calibration=letters(tmp_path), batch_size=4)
    model, passed = model_of(llama), []
    for block in blocks_of(model):
        block.register_forward_hook(
            lambda _, given, left: passed.append(1 - torch.cosine_similarity(given[0], left, dim=-1).mean())
        )
    loss(model, letters_tokens(llama, tmp_path))
    assert list(report.details["layer_scores"].values()) == pytest.approx([float(score) for score in passed], rel=1e-4)
    assert report.details["removed_layers"] == sorted(sorted(range(6), key=passed.__getitem__)[:2])
    assert report.calibrated_on[0]["dataset"].endswith("letters.txt")


def test_perplexity_is_that_of_the_model_without_the_block(llama: Path, tmp_path: Path) -> None:
    report = pruned(
        llama,
        tmp_path / "target",
        remove_layers=2,
        layer_importance="perplexity",
        calibration=letters(tmp_path),
        batch_size=4,
    )
    tokens = letters_tokens(llama, tmp_path)
    want = [math.exp(loss(skipping_(model_of(llama), [index]), tokens)) for index in range(6)]
    assert list(report.details["layer_scores"].values()) == pytest.approx(want, rel=1e-4)
    assert report.details["calibration_perplexity"] == pytest.approx(math.exp(loss(model_of(llama), tokens)), rel=1e-4)
    assert report.details["removed_layers"] == sorted(sorted(range(6), key=want.__getitem__)[:2])


def test_one_by_one_scores_anew_without_the_blocks_that_went(llama: Path, tmp_path: Path) -> None:
    fields = {
        "remove_layers": 2,
        "layer_importance": "perplexity",
        "layer_search": "one_by_one",
        "calibration": letters(tmp_path),
    }
    report = pruned(llama, tmp_path / "target", **fields)
    tokens = letters_tokens(llama, tmp_path)
    first, second = report.details["rounds"][0]["block"], report.details["rounds"][1]
    without = {
        index: math.exp(loss(skipping_(model_of(llama), [first, index]), tokens))
        for index in range(6)
        if index != first
    }
    assert second == {
        "block": min(without, key=without.__getitem__),
        "score": pytest.approx(min(without.values()), rel=1e-4),
    }
    assert report.details["removed_layers"] == sorted([first, second["block"]])


@pytest.mark.parametrize("measure", ["perplexity", "block_influence"])
def test_contiguous_blocks_are_scored_together(measure: str, llama: Path, tmp_path: Path) -> None:
    fields = {
        "remove_layers": 3,
        "layer_importance": measure,
        "layer_search": "contiguous",
        "calibration": letters(tmp_path),
    }
    report = pruned(llama, tmp_path / "target", **fields)
    tokens, want = letters_tokens(llama, tmp_path), []
    if measure == "perplexity":
        want = [math.exp(loss(skipping_(model_of(llama), range(start, start + 3)), tokens)) for start in range(4)]
    else:
        model, states = model_of(llama), []
        for block in blocks_of(model):
            block.register_forward_pre_hook(lambda _, given: states.append(given[0]))
        model.model.norm.register_forward_pre_hook(lambda _, given: states.append(given[0]))
        loss(model, tokens)
        want = [
            float(1 - torch.cosine_similarity(states[start], states[start + 3], dim=-1).mean()) for start in range(4)
        ]
    assert list(report.details["run_scores"].values()) == pytest.approx(want, rel=1e-4)
    start = min(range(4), key=want.__getitem__)
    assert report.details["removed_layers"] == [start, start + 1, start + 2]


def test_sizes_are_told(llama: Path, tmp_path: Path) -> None:
    report = pruned(llama, tmp_path / "target", remove_layers=[0, 1, 5])
    before, after = report.details["before"], report.details["after"]
    assert [before[key] for key in ("parameters", "bytes")] == [
        Checkpoint(llama).shape.elements,
        Checkpoint(llama).shape.size_bytes,
    ]
    assert after["parameters"] == Checkpoint(tmp_path / "target").shape.elements
    assert (before["kv_cache_bytes_per_token"], after["kv_cache_bytes_per_token"]) == (768, 384)
    assert report.notes[0].startswith(f"{before['parameters']:,} -> {after['parameters']:,} parameters, ")
    assert "768 -> 384 bytes of KV cache a token; distill it" in report.notes[0].replace(",", "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing is asked"),
        ({"remove_layers": []}, "the list is empty"),
        ({"remove_layers": [1, 1]}, "1 is here twice"),
        ({"remove_layers": [-1]}, "-1 is not at least 0"),
        ({"remove_layers": 1.5}, "1.5 is no fraction between 0 and 1"),
        ({"remove_layers": 0}, "remove_layers: 0 is less than 1"),
        ({"remove_layers": [1], "layer_importance": "perplexity"}, "remove_layers names them: give one of the two"),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    faults = validate(PruneStructured, fields)
    assert isinstance(faults, list)
    assert re.search(message, faults[0].message), faults[0].message


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (6, "prune_structured.remove_layers: 6 of 6 blocks would leave none. Remove at most 5."),
        (0.99, "prune_structured.remove_layers: 6 of 6 blocks would leave none. Remove at most 5."),
        (0.05, "prune_structured.remove_layers: 0.05 of 6 blocks is none. Take at least 0.167, or a whole number."),
        ([2, 6, 9], "prune_structured.remove_layers: 6, 9: no such block. The model has 6, counted from 0 to 5."),
    ],
)
def test_plans_refuse_what_the_model_cannot_lose(asked: Any, message: str, llama: Path) -> None:
    assert refused(llama, remove_layers=asked) == message


def test_a_quantized_model_is_refused(llama: Path, tmp_path: Path) -> None:
    source = changed_copy(llama, tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(SourceError, match="the model is quantized already"):
        PruneStructured(remove_layers=(1,)).run(source, tmp_path, Context())


def test_a_block_that_computes_something_else_at_its_new_place(tmp_path: Path) -> None:
    source = save_model("gpt2", tmp_path / "source", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(
        StageError,
        match=r"prune_structured: transformer.h.2: in the smaller model it computes something else: .*Remove",
    ) as caught:
        pruned(source, tmp_path / "target", remove_layers=[1])
    assert "0.001 is the limit" in str(caught.value)


def test_logits_that_are_not_finite(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smaller_proof, "logits_behind", lambda *_: torch.tensor([float("nan")]))
    with pytest.raises(StageError, match="the logits of the smaller model are NaN or Inf"):
        pruned(llama, tmp_path / "target", remove_layers=[1])


@pytest.mark.parametrize("search", ["at_once", "contiguous"])
def test_logits_are_in_the_predicted_memory(search: str, tmp_path: Path) -> None:
    """They are most of it if the vocabulary is large and the text is short."""
    source = save_model("llama", tmp_path / "source", vocab_size=16384)
    fields = {
        "remove_layers": 2,
        "layer_importance": "perplexity",
        "layer_search": search,
        "calibration": letters(tmp_path, 6, 200),
    }
    stage = validate(PruneStructured, fields)
    assert not isinstance(stage, list), stage
    with LiveBytes() as live:
        run_stage(stage, source, tmp_path / "target")
    assert live.peak <= stage.predict(Checkpoint(source).shape, "cuda")[0].gpu_bytes <= 1.2 * live.peak
