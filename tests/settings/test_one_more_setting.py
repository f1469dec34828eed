"""A tenth setting is its own file and an entry point: nothing else of optkit has to know it."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from optkit import open_artifact, run
from optkit.common import plug_ins
from optkit.errors import OptkitError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.recipe import registry
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.session.torch_session import TorchSession
from optkit.settings.offload import Offload
from optkit.settings.speculative import Speculative
from optkit.stage import Loading, Opening, Setting, exclusion

ROOT = Path(__file__).parents[2]
TENTH = '''
from typing import Any, ClassVar

from pydantic import Field

from optkit.stage import Setting


class Parrot(Setting):
    """Propose that the last token comes again, for the model to check."""

    kind: ClassVar[str] = "parrot"
    shorthand: ClassVar[str] = "tokens"

    tokens: int = Field(ge=1)
    """Tokens proposed at once."""

    def excludes(self, other: Setting, device: str) -> str:
        return "Only one of them can propose" if other.kind == "speculative" else ""

    def on_open(self, session: Any) -> Any:
        session.speculate_with(Again(), self.tokens)
        return session


class Again:
    def start(self, state: Any) -> None: ...

    def read_bytes(self, batch: int, context: int) -> int:
        return 0

    def propose(self, known: Any, count: int) -> Any:
        return known[:, -1:].repeat(1, count)
'''


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the module as a package would be: beside the metadata of its entry point."""
    (tmp_path / "optkit_parrot.py").write_text(TENTH, encoding="utf-8")
    metadata = tmp_path / "optkit_parrot-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: optkit-parrot\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[optkit.stages]\nparrot = optkit_parrot:Parrot\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    plug_ins.plugged_in.cache_clear()
    yield
    plug_ins.plugged_in.cache_clear()


@pytest.mark.usefixtures("parrot")
def test_it_goes_the_whole_way(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    recipe = {"model": str(model), "stages": [{"parrot": 3}], "evals": ["footprint"]}
    card = run(load_recipe(recipe), out=tmp_path / "artifact", device="cpu")
    assert list(card.settings) == ["parrot: {'tokens': 3}"]
    session, prompt = open_artifact(tmp_path / "artifact", device="cpu"), torch.arange(8).reshape(1, 8)
    assert isinstance(session, TorchSession)
    assert session.generate(prompt, 12).equal(open_session(model).generate(prompt, 12))
    assert session.speculation is not None
    assert session.speculation.proposed > 3


@pytest.mark.usefixtures("parrot")
def test_it_says_what_it_cannot_stand_beside(tiny_model: Callable[[str], Path]) -> None:
    stages = [{"parrot": 3}, {"speculative": {"prompt_lookup": 2}}]
    with pytest.raises(OptkitError, match=r"parrot.* exclude each other.* Only one of them can propose"):
        load_recipe({"model": "smollm2-135m", "stages": stages})
    parrot = registry.stage_class("parrot").model_validate({"tokens": 3})
    assert isinstance(parrot, Setting)
    for settings in ([parrot, Speculative(prompt_lookup=2)], [Speculative(prompt_lookup=2), parrot]):
        with pytest.raises(StageError, match=r"exclude each other\. Only one of them can propose"):
            open_session(tiny_model("llama"), settings)


class Double(Setting):
    """Opens the model itself, in float64."""

    kind: ClassVar[str] = "double"

    def open(self, opening: Opening) -> Any:
        return open_session(opening.directory, (), opening.device, "float64")


class Spread(Setting):
    """Says how transformers reads the weights."""

    kind: ClassVar[str] = "spread"
    places_weights: ClassVar[bool] = True

    def loading(self, opening: Opening, checkpoint: Checkpoint, packed: bool) -> Loading:
        def finish(model: Any) -> Sequence[str]:
            return [f"spread: {opening.dtype}, {model.config._attn_implementation}, packed: {packed}"]

        return Loading({"attn_implementation": "eager"}, finish)


def test_it_opens_the_model_itself(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(tiny_model("llama"), [Double()])
    assert isinstance(session, TorchSession)
    assert session.dtype == "float64"


def test_it_says_how_transformers_loads(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(tiny_model("llama"), [Spread()], dtype="bfloat16")
    assert "spread: bfloat16, eager, packed: False" in session.notes


def test_two_cannot_both_place_weights() -> None:
    found = exclusion([Spread(), Offload()], "cpu")
    assert found is not None
    assert found[0] == 1
    assert "Each of the two says itself where every weight lies" in str(found[1])


def test_no_other_module_names_a_setting() -> None:
    """Settings are known by their contract: only the registry, by strings, and each other."""
    names = "|".join(target.rpartition(":")[2] for target in registry.STAGES.values() if ".settings." in target)
    for path in (*ROOT.glob("optkit/**/*.py"), *ROOT.glob("cli/**/*.py"), *ROOT.glob("evals/**/*.py")):
        if path.parent.name != "settings" and path.name != "registry.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(rf"optkit\.settings|isinstance\([^)]*\b({names})\b", text), path
