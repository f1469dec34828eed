"""Models of many architectures through cheap stages: as docs/understand/models.json says, and no crash."""

from pathlib import Path

import pytest

from optkit.recipe.registry import STAGES as KINDS
from tests.zoo.cells import cell
from tests.zoo.models import save_model
from tests.zoo.stages import STAGES
from tests.zoo.table import Table, template

TABLE = Table.read()
CHEAP = ("attention", "rtn")
DIFFERENT = ("bert", "bloom", "deepseek_v3", "gemma4_text", "gpt2", "gpt_oss", "llama", "mixtral", "opt", "phi")
"""Architectures that differ in what stages touch; all of them: `make zoo`."""
MENDED = [
    ("cosmos3_edge", "awq_scale"),
    ("ctrl", "mx"),
    ("deberta", "cast"),
    ("deepseek_v32", "auto_bits"),
    ("deepseek_v4", "fp8"),
    ("deepseek_v4", "lora_recover"),
    ("gemma3n_text", "distill"),
    ("hrm_text", "offload"),
    ("idefics2", "kv_scales"),
    ("inkling_text", "kv_cache"),
    ("llama4", "lora_recover"),
    ("minicpm3", "prune_structured"),
    ("mpt", "prune_structured channels"),
    ("phimoe", "auto_bits"),
    ("prophetnet", "int8"),
    ("qwen2_5_omni_thinker", "distill"),
    ("qwen2_vl", "distill"),
    ("qwen3_moe", "gguf"),
    ("recurrent_gemma", "kv_scales"),
    ("rwkv", "compile"),
    ("rwkv", "rotate"),
    ("step3p7", "rtn"),
    ("umt5", "cast"),
    ("xlnet", "attention"),
    ("xlnet", "compile"),
    ("xlstm", "distill"),
]
"""Cells that crashed, differed or were refused late."""


@pytest.mark.parametrize(("kind", "stage"), [*((kind, stage) for kind in DIFFERENT for stage in CHEAP), *MENDED])
def test_what_the_table_says(kind: str, stage: str, tmp_path: Path) -> None:
    source = save_model(kind, tmp_path / "model")
    (desk := tmp_path / "desk").mkdir()
    mark, said = cell(source, stage, desk)
    assert (mark, template(kind, stage, said)) == TABLE.rows[kind][stage]


def test_every_stage_has_a_column() -> None:
    assert {column.partition(" ")[0] for column in STAGES} == {*KINDS}
