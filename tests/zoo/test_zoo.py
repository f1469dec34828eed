"""Models of many architectures through cheap stages: as docs/understand/models.json says, and no crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.recipe.registry import STAGES as KINDS
from tests.zoo.cells import BAD, REFUSED, SAME, cell
from tests.zoo.models import save_model
from tests.zoo.stages import STAGES
from tests.zoo.table import Table

TABLE = Table.read()
CHEAP = ("attention", "rtn")
DIFFERENT = ("bert", "bloom", "deepseek_v3", "gemma4_text", "gpt2", "gpt_oss", "llama", "mixtral", "opt", "phi")
"""Architectures that differ in what stages touch; all of them: `make zoo`."""


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_the_table_says_of_a_model(kind: str, tmp_path: Path) -> None:
    source = save_model(kind, tmp_path / "model")
    for stage in CHEAP:
        (desk := tmp_path / stage).mkdir()
        assert tuple(cell(source, stage, desk)) == TABLE.rows[kind][stage]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("deberta", "cast"),
        ("deepseek_v32", "auto_bits"),
        ("deepseek_v4", "fp8"),
        ("gemma3n_text", "distill"),
        ("idefics2", "kv_scales"),
        ("phimoe", "auto_bits"),
        ("prophetnet", "int8"),
        ("qwen2_vl", "distill"),
        ("recurrent_gemma", "kv_scales"),
        ("rwkv", "rotate"),
        ("step3p7", "rtn"),
        ("umt5", "cast"),
        ("xlnet", "attention"),
    ],
)
def test_cells_of_crashes_that_were_mended(kind: str, stage: str, tmp_path: Path) -> None:
    source = save_model(kind, tmp_path / "model")
    (desk := tmp_path / "desk").mkdir()
    assert (found := cell(source, stage, desk)).mark not in BAD, found.said


@pytest.mark.parametrize(
    ("kind", "stage", "mark"),
    [
        ("cosmos3_edge", "awq_scale", SAME),
        ("hrm_text", "offload", REFUSED),
        ("inkling_text", "kv_cache", SAME),
        ("llama4", "lora_recover", SAME),
        ("minicpm3", "prune_structured", SAME),
        ("qwen2_5_omni_thinker", "distill", SAME),
        ("mpt", "prune_structured channels", REFUSED),
        ("qwen3_moe", "gguf", REFUSED),
        ("rwkv", "compile", SAME),
        ("xlnet", "compile", REFUSED),
        ("xlstm", "distill", SAME),
    ],
)
def test_cells_that_were_refused_late(kind: str, stage: str, mark: str, tmp_path: Path) -> None:
    source = save_model(kind, tmp_path / "model")
    (desk := tmp_path / "desk").mkdir()
    assert (found := cell(source, stage, desk)).mark == mark, found.said


def test_every_stage_has_a_column() -> None:
    assert {column.partition(" ")[0] for column in STAGES} == {*KINDS}
