"""Executor `ray` on a real Ray: what a sweep leaves, a lost process, a failure, Ctrl-C, a lost node."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from optkit.artifact import read_artifact
from optkit.errors import StoreError, UsageError
from optkit.pipeline import read_scorecard
from optkit.recipe.recipe import load_recipe
from optkit.sweep.executors.base import Needs, Order
from optkit.sweep.executors.ray import START_A_NODE, START_BEFORE, RayExecutor, join
from optkit.sweep.record import read_record
from optkit.sweep.run import Sweep, sweep
from tests.support.fresh_python import environment
from tests.support.remembered import Lines
from tests.support.sweeps import Here, made, order_of, recipe
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # Ray gives its own agents fifteen seconds to start, which a busy machine exceeds
MATRIX = {"stages.1.rtn.bits": [4, 8], "include": [{"stages.1.rtn": {"bits": 3, "group_size": 16}}]}


@pytest.fixture(scope="module")
def embedded() -> Iterator[str]:
    """Start one Ray for all of these tests, and give its address; an executor uses the one that is there."""
    join()
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def run(home: Path, out: str, executor: Any, asked: dict[str, Any], progress: Any = None) -> Sweep:
    (home / "s.json").write_text(json.dumps(asked))
    places = {"out": home / out, "store": home / f"store-{out}", "device": "cpu"}
    return sweep(home / "s.json", executor=executor, progress=progress, **places)


def test_it_leaves_what_this_machine_would(
    embedded: str, tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path
) -> None:
    from ray._common.usage import usage_lib

    assert not usage_lib.usage_stats_enabled()
    asked = recipe(tiny_model("llama"), letters, matrix=MATRIX)
    lines = Lines()
    there = run(tmp_path, "there", RayExecutor(), asked, lines)
    here = run(tmp_path, "here", Here(), asked)
    assert [str(entry.status) for entry in there.record.entries] == ["done"] * 3
    assert {"bits4: cast of 29 tensors", "bits8: rtn of 3 blocks"} <= {*lines.lines}
    assert sum("cast of" in line for line in lines.lines) == 1
    for entry in here.record.entries:
        ours, theirs = (read_artifact(tmp_path / name / entry.name).record for name in ("here", "there"))
        assert ours.key == theirs.key == there.record.entry(entry.name).artifact_key
        digests = [{name: its["sha256"] for name, its in each.files.items()} for each in (ours, theirs)]
        assert digests[0] == digests[1]
        cards = [read_scorecard(tmp_path / name / entry.name) for name in ("here", "there")]
        assert cards[0].rows == cards[1].rows
        assert cards[0].notes == cards[1].notes


def test_a_lost_process_is_no_loss_and_a_failure_is_told_once(
    embedded: str, tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path
) -> None:
    lines, wanted = Lines(), order_of(tmp_path, tiny_model("llama"), "lost", letters)
    gone = tmp_path / "gone.txt"
    gone.write_text(letters.read_text())
    failing = order_of(tmp_path, tiny_model("llama"), "failing", gone)
    gone.unlink()
    with RayExecutor() as executor:
        executor.begin(wanted)
        assert wait_until(lambda: not executor.ended(lines, 0.5) and "lost: rtn of 3 blocks" in lines.lines)
        next(each for each in psutil.process_iter(["cmdline"]) if at_work(each, "lost")).kill()
        assert made(executor, wanted, lines).verdict == "PASS"
        executor.begin(failing)
        outcome = made(executor, failing, lines)
    assert "gone.txt" in outcome.reason
    begun = [line.partition(":")[0] for line in lines.lines if "begins on" in line]
    assert begun == ["lost", "lost", "failing"]


def test_what_no_node_can_do_is_said(embedded: str, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    recipe = load_recipe({"model": str(tiny_model("llama")), "evals": ["footprint"]})
    large = Order("one", recipe, tmp_path / "s" / "one", "cuda", tmp_path / "store", None, needs=Needs(1, 9, 1 << 30))
    with RayExecutor() as executor:
        executor.begin(large)
        reason = executor.ended(Lines(), None)["one"].reason
    said = "one: no node has what it needs (CPU: 1, GPU: 9, memory: 1.07 GB). Ray's nodes have CPU: "
    assert reason.startswith(said)
    with pytest.raises(StoreError, match="it does not see the store"), RayExecutor() as executor:
        executor._leave_sign = lambda store: str(tmp_path / "nowhere")
        executor.begin(large)


@pytest.mark.parametrize(
    ("address", "where", "remedy", "tries"),
    [("nobody:1", "--address nobody:1", START_A_NODE, 1), ("", "--executor ray", START_BEFORE, 3)],
)
def test_a_ray_that_cannot_be_had_is_said(
    monkeypatch: pytest.MonkeyPatch, address: str, where: str, remedy: str, tries: int
) -> None:
    def nowhere(*_: object, **__: object) -> None:
        tried.append(1)
        raise ConnectionError("no answer\nand more")

    tried: list[int] = []
    monkeypatch.setattr(ray, "init", nowhere)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(UsageError) as error:
        join(address)
    assert str(error.value) == f"{where}: Ray cannot be used: no answer. {remedy}."
    assert len(tried) == tries


def test_ctrl_c_leaves_what_the_same_command_goes_on_with(
    embedded: str, tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path
) -> None:
    asked = recipe(tiny_model("llama"), letters, matrix={"stages.1.rtn.bits": [4, 8]})
    (tmp_path / "s.json").write_text(json.dumps(asked))
    words = ["sweep", "s.json", "--device", "cpu", "--store", "store-s", "--out", "s", "--executor", "ray"]
    command = [sys.executable, "-m", "optkit_cli.main", *words, "--address", embedded]
    said = tmp_path / "said"
    with said.open("wb") as file, subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=file) as process:
        assert wait_until(lambda: b"bits4: begins on" in said.read_bytes() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT, said.read_text()
    record = read_record(tmp_path / "s")
    assert record
    assert [str(entry.status) for entry in record.entries] == ["waiting"] * 2
    assert wait_until(lambda: not [each for each in psutil.process_iter(["cmdline"]) if at_work(each, "bits4")])
    assert [str(entry.status) for entry in run(tmp_path, "s", Here(), asked).record.entries] == ["done"] * 2


def at_work(process: psutil.Process, name: str) -> bool:
    return (process.info["cmdline"] or [])[:1] == [f"ray::{name}"]
