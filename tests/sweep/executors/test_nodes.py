"""What executors on a cluster share, without a cluster: what begins when, refusals, what nodes say."""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optkit_cli.explain import found_by

from optkit import __version__
from optkit.errors import OptkitError, ResourceError, StoreError, UsageError
from optkit.recipe.recipe import load_recipe
from optkit.store.store import Store
from optkit.sweep import run as sweeping
from optkit.sweep.executors import nodes, on_node, registry
from optkit.sweep.executors.base import Needs, Order, Outcome
from optkit.sweep.executors.nodes import NodesExecutor
from optkit.sweep.executors.on_node import make_on_node, refusal
from optkit.sweep.order import ready
from optkit.sweep.run import sweep
from tests.support.remembered import Lines
from tests.support.sweeps import NAMES, Here, recipe

RECIPE = load_recipe("model: smollm2-135m\nevals: [footprint]\ngates: {size_bytes: '<= 1x'}\n")


def plan(*keys: str, hits: int = 0) -> Any:
    return SimpleNamespace(pending=[SimpleNamespace(key=key) for key in keys[hits:]])


def test_of_those_that_share_a_step_one_goes_first() -> None:
    plans = {"a": plan("m", "cast", "4"), "b": plan("m", "cast", "8"), "c": plan("m", "half", "4b")}
    there = {"m"}
    assert ready(plans, [], there.__contains__) == ["a", "c"]
    assert ready(plans, ["a", "c"], there.__contains__) == []
    assert ready(plans, ["a", "c"], (there | {"cast"}).__contains__) == ["b"]
    assert ready({"b": plans["b"]}, [], there.__contains__) == ["b"]


class Pretended(NodesExecutor):
    """Has nodes that say and give back what a test wants."""

    def __init__(self, *lines: dict[str, Any], **result: Any) -> None:
        super().__init__()
        self.said, self.result = lines, {"verdict": "PASS", "reason": "", "seconds": 2.0, "log": "printed\n", **result}
        self.waiting: dict[str, Mapping[str, Any]] = {}
        self.begun: list[list[str]] = []
        self.cancelled: list[str] = []

    def submit(self, order: Order, described: Mapping[str, Any]) -> None:
        self.waiting[order.name] = described

    def results(self, wait_s: float) -> dict[str, dict[str, Any]]:
        self.begun.append([*self.waiting])
        done, self.waiting = dict.fromkeys(self.waiting, self.result), {}
        return done

    def lines(self) -> Iterable[tuple[str, str]]:
        return [(name, json.dumps(line)) for name in self._orders for line in self.said]

    def cancel(self) -> None:
        self.cancelled += self.waiting


def order(home: Path, **changed: Any) -> Order:
    return replace(Order("one", RECIPE, home / "s" / "one", "cuda:1", home / "store", None), **changed)


def test_a_node_sees_its_own_gpu_and_judges_no_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Pretended()
    executor.begin(order(tmp_path, against="none"))
    described = executor.waiting["one"]
    assert (described["device"], described["against"], described["recipe"]["gates"]) == ("cuda", None, {})
    assert Path(described["seen"]).parent == tmp_path / "store"
    assert refusal(described) is None
    executor.stop()
    assert executor.cancelled == ["one"]
    assert not Path(described["seen"]).exists()
    monkeypatch.setenv("OPTKIT_STORE_REMOTE", "s3://there")
    executor.begin(order(tmp_path))
    assert (executor.waiting["one"]["remote"], executor.waiting["one"]["seen"]) == ("s3://there", "")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optkit": "9"}, f"node here: it has optkit {__version__}, and the sweep 9. Install the same everywhere."),
        (
            {"seen": "/nowhere/sign"},
            "node here: it does not see the store /store of the sweep. The steps that it makes would stay there. Name "
            "a store on a disk that all nodes share with --store, or a remote one with --remote.",
        ),
    ],
)
def test_a_node_that_cannot_work_for_a_sweep_says_so_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(on_node.socket, "gethostname", lambda: "here")
    described = {"optkit": __version__, "seen": "", "store": "/store", **changed}
    refused = make_on_node(described, io.StringIO())
    with pytest.raises(StoreError) as error, Pretended(**refused) as executor:
        executor.begin(order(tmp_path))
        executor.ended(Lines(), None)
    assert str(error.value) == said
    assert any(message.error == "StoreError" for message in found_by(said)), "`optkit explain` knows it"


def test_what_a_node_says_has_the_name_of_its_recipe_and_begins_anew_with_another_node(tmp_path: Path) -> None:
    bar = {"type": "task", "id": 1, "label": "rtn", "total": 3, "unit": "blocks"}
    executor = Pretended({"type": "begin"}, bar, {"type": "begin"}, bar, {"type": "say", "line": "so"}, verdict=None)
    lines = Lines()
    with executor:
        executor.begin(order(tmp_path))
        assert executor.ended(lines, None) == {"one": Outcome(None, "", 2.0)}
    assert lines.lines == ["one: rtn of 3 blocks", "end", "one: rtn of 3 blocks", "one: so", "end"]
    assert (tmp_path / "s" / "logs" / "one.log").read_text() == "printed\n"


def test_what_no_node_can_make_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise ResourceError("it needs 9 GPUs", where="one")

    executor = Pretended()
    monkeypatch.setattr(executor, "submit", refusing)
    with executor:
        executor.begin(order(tmp_path))
        assert executor.ended(Lines(), None) == {"one": Outcome(None, "one: it needs 9 GPUs.")}


def test_nothing_comes_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Pretended()
    monkeypatch.setattr(executor, "results", lambda wait_s: {})
    with executor:
        executor.begin(order(tmp_path))
        assert executor.ended(Lines(), 0.0) == {}


def test_a_sweep_hands_over_what_shares_no_unmade_step_and_publishes_it(
    tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of this one make the shared step alone: what is published is then made here."""
    published: list[str] = []
    store = Store(tmp_path / "store")

    def publish(wanted: Any, **given: Any) -> Any:
        published.append(given["out"].name)
        return SimpleNamespace(verdict="PASS")

    class Nodes(Pretended):
        def results(self, wait_s: float) -> dict[str, dict[str, Any]]:
            shared = shared_key()
            if not store.get(shared):
                with store.write(shared) as draft:
                    (draft.model / "weights").touch()
            return super().results(wait_s)

    def shared_key() -> str:
        return str(plans[0].steps[1].key)

    plans: list[Any] = []
    make_plan = sweeping.make_plan
    monkeypatch.setattr(sweeping, "make_plan", lambda *given: plans.append(make_plan(*given)) or plans[-1])
    monkeypatch.setattr(nodes, "run", publish)
    (tmp_path / "s.json").write_text(json.dumps(recipe(tiny_model("llama"), letters)))
    executor = Nodes()
    done = sweep(tmp_path / "s.json", out=tmp_path / "s", store=tmp_path / "store", device="cpu", executor=executor)
    assert executor.begun == [NAMES[:1], NAMES[1:]]
    assert published == NAMES
    assert [entry.verdict for entry in done.record.entries] == ["PASS"] * 4
    assert executor.cancelled == []


def test_what_is_at_work_ends_with_the_time(
    tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sweeping.time, "monotonic", lambda: clock[0])

    class Slow(Pretended):
        def ended(self, progress: Any, timeout_s: float | None) -> dict[str, Outcome]:
            clock[0] += timeout_s or 0
            return {}

    (tmp_path / "s.json").write_text(json.dumps(recipe(tiny_model("llama"), letters)))
    places = {"out": tmp_path / "s", "store": tmp_path / "store", "device": "cpu"}
    executor = Slow()
    done = sweep(tmp_path / "s.json", executor=executor, max_hours=0.01, **places)
    assert executor.cancelled[0] == NAMES[0]
    assert [str(entry.status) for entry in done.record.entries] == ["waiting"] * 4


def test_a_plan_says_what_a_recipe_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from optkit.sweep.executors import base

    monkeypatch.setattr(base, "cpu_threads", lambda: 32)
    monkeypatch.setattr(base, "visible_gpus", lambda: 8)
    entries = [SimpleNamespace(value=SimpleNamespace(devices=2)), SimpleNamespace(value=SimpleNamespace())]

    def needs(device: str, stages: list[Any]) -> Needs:
        said: Any = SimpleNamespace(device=device, ram_bytes=5, recipe=SimpleNamespace(stages=stages))
        return Needs.of(said)

    memory = 5 + base.PROCESS_BYTES
    assert needs("cpu", entries) == Needs(32, 0, memory)
    assert needs("cuda", entries[1:]) == Needs(4, 1, memory)
    assert needs("cuda", entries) == Needs(8, 2, memory)
    assert needs("cuda", []) == Needs(4, 1, memory)


def test_an_executor_has_a_name_and_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.EXECUTORS, "here", "tests.support.sweeps:Here")
    assert isinstance(registry.executor_of("here", address=None, slurm={}), Here)
    said = {"--executor: there is no executor 'rai'. Did you mean 'ray'?": ("rai", {})}
    said["--address: the executor local does not take it. Leave it out, or name another executor."] = (
        "local",
        {"address": "there"},
    )
    for text, (name, given) in said.items():
        with pytest.raises(UsageError) as error:
            registry.executor_of(name, **given)
        assert str(error.value) == text


@pytest.mark.parametrize("name", ["ray", "slurm"])
def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"optkit.sweep.executors.{name}.unmet", lambda wanted: wanted)
    with pytest.raises(OptkitError) as error:
        registry.executor_of(name)
    package = {"ray": "ray", "slurm": "submitit"}[name]
    assert str(error.value) == (
        f"--executor {name}: the package `{package}` is not installed. Run: pip install 'optkit[{name}]'."
    )


def test_an_executor_ends_what_is_at_work(tmp_path: Path) -> None:
    executor = Pretended()
    with pytest.raises(KeyboardInterrupt), executor:
        executor.begin(order(tmp_path))
        raise KeyboardInterrupt
    assert executor.cancelled == ["one"]
