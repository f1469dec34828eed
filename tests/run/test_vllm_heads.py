"""Which pruned models vLLM cannot run, because it takes another size of heads than config.json
says.
"""

from pathlib import Path
from typing import Any

import pytest
from optkit_cli.output import plain_text
from optkit_cli.plan_view import plan_view

from optkit import pipeline
from optkit.model.checkpoint import Checkpoint
from optkit.model.vllm_heads import notes_on_heads
from optkit.recipe.recipe import load_recipe
from optkit.stages.prune_structured import PruneStructured
from tests.support.smaller_models import letters, made_model, pruned

SMALL = {"num_hidden_layers": 2}


def config(hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", "hidden_size": hidden, "num_attention_heads": heads, **others}


def test_fewer_heads_are_refused_and_less_width_is_misread() -> None:
    assert notes_on_heads(config(896, 7, head_dim=64)) == (
        "vLLM 0.32 cannot run it: for qwen2 it takes hidden size / heads = 128 for the size of "
        "a head and reads no head_dim,"
        " which is 64 here, so that it refuses the weights; transformers and optkit read it."
        " vLLM runs hidden_size 448 with these 7 heads, or 14 heads with this hidden_size",
    )
    (note,) = notes_on_heads(config(1024, 16, head_dim=128))
    assert "hidden size / heads = 64" in note
    assert "so that it reads a part of the weights and computes something else;" in note
    (note,) = notes_on_heads(config(960, 12, head_dim=128))
    assert note.endswith("vLLM runs hidden_size 1,536 with these 12 heads")


@pytest.mark.parametrize(
    "read",
    [
        config(896, 14),
        config(896, 14, head_dim=64),
        config(896, 7, head_dim=None),
        config(896, 7, head_dim=64) | {"model_type": "llama"},
        {"model_type": "llava", "text_config": config(896, 14, head_dim=64)},
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12},
    ],
)
def test_nothing_is_said_of_what_it_reads(read: dict[str, Any]) -> None:
    assert notes_on_heads(read) == ()


def test_the_language_model_of_another_is_looked_at() -> None:
    assert notes_on_heads({"model_type": "llava", "text_config": config(896, 7, head_dim=64)})[0].startswith(
        "vLLM 0.32 cannot run it"
    )


@pytest.mark.parametrize("fields", [{"attention_heads": 2}, {"hidden_size": 16, "multiple_of": 16}])
def test_the_plan_and_the_report_say_it(fields: dict[str, Any], tmp_path: Path) -> None:
    source, text = made_model("qwen2", **SMALL), letters(tmp_path)
    for device in ("cpu", "cuda"):
        cost, _ = PruneStructured(**fields).predict(Checkpoint(source).shape, device)
        assert len(cost.notes) == 1
    report = pruned(source, tmp_path / "target", **fields, calibration=text)
    assert report.notes[1:] == cost.notes == notes_on_heads(Checkpoint(tmp_path / "target").config)


def test_widths_that_keep_the_size_of_a_head_and_what_is_read_have_no_note(tmp_path: Path) -> None:
    for kind, fields in (
        ("qwen2", {"attention_heads": 2, "hidden_size": 16, "multiple_of": 16}),
        ("qwen2", {"intermediate_size": 32, "multiple_of": 16}),
        ("llama", {"attention_heads": 2}),
    ):
        cost, _ = PruneStructured(**fields).predict(Checkpoint(made_model(kind, **SMALL)).shape, "cpu")
        assert cost.notes == ()


def test_the_table_of_a_plan_has_it(tmp_path: Path) -> None:
    stage = {
        "prune_structured": {
            "attention_heads": 2,
            "calibration": {"dataset": "python-reference", "sequence_length": 64},
        }
    }
    recipe = {"model": str(made_model("qwen2", **SMALL)), "stages": [stage], "evals": ["footprint"]}
    planned = pipeline.plan(load_recipe(recipe), device="cpu", store=tmp_path / "store", data=None)
    told = " ".join(plain_text(plan_view(planned)).split())
    assert f"note prune_structured: {planned.steps[1].cost.notes[0]}" in told
