"""Models of many architectures through cheap stages: as docs/understand/models.json says, and no crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.recipe.registry import STAGES as KINDS
from tests.zoo.cells import cell
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


def test_every_stage_has_a_column() -> None:
    assert {column.partition(" ")[0] for column in STAGES} == {*KINDS}
