"""What all cases share: a tiny random model, the recipe that is run with it, files that betray
executed code, and what a run left.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.storm.forked import Ended, apart, call

CANARIES = "canaries"
PEACE = "peace"
TEXT = {"dataset": "python-reference", "split": "test", "window": 32, "windows": 4}
RECIPE: dict[str, Any] = {
    "name": "storm",
    "model": "model",
    "stages": ["bf16", {"rtn": {"bits": 4, "group_size": 32}}, {"kv_cache": {"dtype": "int8"}}],
    "evals": ["footprint", {"perplexity": TEXT}, {"divergence": TEXT}],
}
VOLATILE = {
    "created",
    "seconds",
    "mtime_ns",
    "environment",
    "optkit",
    "files",
    "notes",
    "cached",
    "baseline_notes",
    "memory",
}
"""What differs between two runs that are right: moments, and where they were measured."""


@dataclass
class Desk:
    """A directory to work in, shared by the cases of a family."""

    root: Path
    draw: random.Random
    seconds: float
    """What a run takes that nobody disturbs; what it left lies in `peace`."""
    failures: list[str] = field(default_factory=list)
    cases: int = 0

    @property
    def peace(self) -> Path:
        """Where the recipe was run in peace."""
        return self.root.parent / PEACE

    def place(self, name: str) -> Path:
        """Return an empty directory of a case, with the recipe and the model."""
        made = self.root / f"{self.cases:04}-{name}"
        made.mkdir(parents=True)
        (made / "model").symlink_to(self.root / "model", target_is_directory=True)
        write(made / "r.yaml", RECIPE)
        return made

    def judge(self, name: str, flaws: list[str], ended: Ended | None = None) -> None:
        """Count a case, and keep what is wrong with it; code that was executed has left a canary."""
        self.cases += 1
        for canary in (self.root / CANARIES).iterdir():
            flaws = [*flaws, f"code was executed: {canary.name}"]
            canary.unlink()
        if flaws:
            self.failures.append(f"{name}: {'; '.join(flaws)}" + (f"\n      {ended.told()}" if ended else ""))

    def canary(self, name: str) -> Path:
        """Return a file that code which must not run would write."""
        return self.root / CANARIES / name


def open_desk(root: Path, seed: str, seconds: float) -> Desk:
    """Return a desk whose draws follow from a seed."""
    (root / CANARIES).mkdir(parents=True)
    return Desk(root, random.Random(seed), seconds)


def write(path: Path, recipe: dict[str, Any]) -> None:
    """Write a recipe as JSON, which is YAML."""
    path.write_text(json.dumps(recipe), encoding="utf-8")


def make_model(directory: Path) -> None:
    """Write the tiny model, in a fork: what computes here would leave threads that a fork does not
    have.
    """
    from tests.support.tiny_models import save_tiny_model

    assert apart(lambda: save_tiny_model("llama", directory), 120) == 0


def run_words(out: str = "out", store: str = "store", recipe: str = "r.yaml") -> list[str]:
    """Return the words of a run on the CPU."""
    return ["run", recipe, "--device", "cpu", "--out", out, "--store", store]


def run_in_peace(place: Path) -> float:
    """Run the recipe in `place / PEACE`, once kernels are compiled; return the seconds that it
    took.
    """
    for name in ("first", PEACE):
        made = place / name
        made.mkdir()
        (made / "model").symlink_to(place / "model", target_is_directory=True)
        write(made / "r.yaml", RECIPE)
        ended = call(run_words(), made, limit_s=300)
        assert ended.status == 0, ended.told()
    return ended.seconds


def left(place: Path, out: str = "out", store: str = "store") -> dict[str, str]:
    """Return digests of all that a run left: weights byte by byte, records and scorecards but for
    moments.
    """
    found = dict(_artifact(place / out))
    for step in sorted((place / store / "steps").iterdir()):
        found |= {f"step {step.name[:8]} {name}": digest for name, digest in _files(step / "model")}
    for metric in sorted((place / store / "metrics").iterdir()):
        value = json.loads(metric.read_text(encoding="utf-8"))["value"]
        found[f"metric {metric.name[:8]}"] = _digest(json.dumps(_settled(value), sort_keys=True).encode())
    return found


def rubbish(place: Path, store: str = "store") -> list[str]:
    """Return what a finished run may not leave: drafts, beside the artifact and in the store."""
    return [
        path.name
        for path in (*(place / store / "drafts").glob("*"), *place.glob(".*.draft-*"), *place.glob(".*.old-*"))
    ]


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return what is not as it should be, by name."""
    return [f"{name} {'differs' if name in wanted and name in found else 'is lost' if name in wanted else 'is new'}"
            for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]  # fmt: skip


def clear(place: Path) -> None:
    """Delete the directory of a case that went well."""
    shutil.rmtree(place, ignore_errors=True)


Family = Callable[[Desk, int | None], None]


def _artifact(out: Path) -> Iterator[tuple[str, str]]:
    for name, digest in _files(out):
        if name.endswith(".json") and name in ("optkit.json", "scorecard.json"):
            said = json.loads((out / name).read_text(encoding="utf-8").replace(str(out.parent), ""))
            yield f"artifact {name}", _digest(json.dumps(_settled(said), sort_keys=True).encode())
        elif name not in ("scorecard.md", "scorecard.html"):
            yield f"artifact {name}", digest


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), _digest(path.read_bytes())


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settled(each) for key, each in value.items() if key not in VOLATILE}
    return [_settled(each) for each in value] if isinstance(value, list) else value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
