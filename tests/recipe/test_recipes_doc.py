from __future__ import annotations

import re

from optkit.recipe.reference import recipes_page
from optkit.recipe.registry import PRESETS, eval_class, eval_names, stage_class, stage_names

PAGE = recipes_page()


def test_every_kind_field_and_preset_is_on_it() -> None:
    for kind, model in [
        *((kind, stage_class(kind)) for kind in stage_names()),
        *((kind, eval_class(kind)) for kind in eval_names()),
    ]:
        section = PAGE.split(f"### `{kind}`")[1].split("\n#")[0]
        assert all(f"| `{name}` |" in section for name in model.model_fields)
    assert all(f"| `- {preset}` |" in PAGE for preset in PRESETS)


def test_every_row_of_a_table_has_the_cells_of_its_head() -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line) for line in table.splitlines()]
        assert len({len(cells) for cells in lines}) == 1, table
        assert all(cells[-2].strip() for cells in lines), table


def test_every_link_has_its_section() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 _-]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
