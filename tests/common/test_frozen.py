"""A record that another process restores."""

import json

from optkit.common.frozen import described, restored
from optkit.settings.attention import Attention
from optkit.stage import Setting
from optkit.stages.smoothquant import SmoothQuant


class Nameless(Setting):
    """As a plug-in's class may be."""

    strength: int = 1


class Like(SmoothQuant):
    """Inherits from a built-in stage, and with it no name."""


def test_a_kind_that_the_registry_filled_in_is_known_in_another_process() -> None:
    for owner, kind in ((Nameless, "nameless"), (Like, "like")):
        owner.kind = kind
        said = json.loads(json.dumps(described(owner())))
        del owner.kind  # another process imports the class as it is written
        assert (restored(said), owner.kind) == (owner(), kind)
    assert SmoothQuant.kind == "smoothquant"
    assert restored(described(Attention(implementation="sdpa"))).kind == "attention"
