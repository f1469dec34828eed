"""A turn in a process of its own: what goes there and what comes back, how it ends, and that the
numbers are those of a turn here.
"""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from optkit_evals.encoding import Encoding
from optkit_evals.load import Load
from optkit_evals.roofline import Roofline
from optkit_evals.speculation import Speculation
from optkit_evals.throughput import Throughput

from optkit.common.frozen import described, restored
from optkit.errors import EvalError, MissingPackageError, ResourceError
from optkit.measure import EvalContext
from optkit.measuring import fresh_process as parent
from optkit.measuring import fresh_process_worker as child
from optkit.measuring.fresh_process import measure_apart
from optkit.pipeline import evaluate
from optkit.processes.child_program import Parent
from optkit.processes.crashes import ChildEndedError, ChildError
from optkit.progress import SilentProgress
from optkit.settings.attention import Attention
from optkit.settings.speculative import Speculative
from tests.support.remembered import Lines
from tests.support.waiting import is_gone

QUICK = {"prompts": [8], "new_tokens": 3, "repeats": 2, "processes": 2, "warmup": 1, "limit_s": 1}


class Interrupting(SilentProgress):
    """Ctrl-C as soon as the process says which it is."""

    pid = 0

    def say(self, line: str) -> None:
        self.pid = int(line)
        raise KeyboardInterrupt


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "MODULE", "tests.support.turn_stand_in")


def turn(directory: Path, context: EvalContext, evals: int = 1, index: int = 1) -> list[parent.Answer]:
    return measure_apart(
        directory, [Attention(implementation="eager")], [Throughput()] * evals, "cpu", True, context, index
    )


def test_what_goes_there_and_comes_back(stand_in: None, tmp_path: Path) -> None:
    progress = Lines()
    context = EvalContext(seed=3, progress=progress, data=tmp_path, calibrated_on=({"dataset": "d"},))
    answers = turn(tmp_path / "good", context, evals=2)
    assert len(answers) == 2
    assert answers[0].found.metrics[0].samples == (0.1, 1 / 3)
    assert answers[0].found.attachments[0].content == bytes([0, 255])
    assert answers[0].session_notes == ("opened",)
    assert answers[0].environment["waiting"] == "0"
    assert set(filter(None, map(os.path.abspath, sys.path))) <= set(answers[0].environment["path"])
    order = json.loads(answers[0].notes[0])
    assert restored(order["settings"][0]) == Attention(implementation="eager")
    assert [restored(each) for each in order["evals"]] == [Throughput(), Throughput()]
    kept = {key: order[key] for key in ("seed", "data", "turn", "device", "trust_remote_code", "calibrated_on")}
    assert kept == {
        "seed": 3,
        "data": str(tmp_path),
        "turn": 1,
        "device": "cpu",
        "trust_remote_code": True,
        "calibrated_on": [{"dataset": "d"}],
    }
    assert progress.lines == ["opened"]


@pytest.mark.parametrize(("others", "policy"), [(0.0, None), (0.4, "PASSIVE")])
def test_threads_sleep_while_they_wait_beside_others(
    stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: float, policy: str | None
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(parent, "crowd", lambda: others)
    first, second = turn(tmp_path / "good", EvalContext(), evals=2)
    assert first.environment["policy"] == policy
    assert "OMP_WAIT_POLICY" not in os.environ
    said = (
        "throughput: other programs used 40% of the cores as a turn began, so threads slept while they waited;"
        " run again with --retime on a quiet machine"
    )
    told = [said] if policy else []
    assert [*first.notes[1:]] == [*first.warnings] == told
    assert second.warnings == ()


def test_the_memory_of_the_process_is_read_in_the_first_turn(stand_in: None, tmp_path: Path) -> None:
    first, second = turn(tmp_path / "good", EvalContext(), evals=2, index=0)
    assert [(each.name, each.allocated_bytes) for each in first.memory] == [("open", ()), ("throughput", ())]
    assert parent.Answer.from_json(first.to_json()) == first
    assert second.memory == ()
    assert [each.memory for each in turn(tmp_path / "good", EvalContext())] == [()]


def test_its_errors_are_ours(stand_in: None, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"^here: memory ran out\. So it is\. Lower it\.$") as memory:
        turn(tmp_path / "no memory", EvalContext())
    assert (memory.value.where, memory.value.remedy) == ("here", "Lower it")
    with pytest.raises(MissingPackageError, match=r"^there: the package `torch` is not installed") as package:
        turn(tmp_path / "no package", EvalContext())
    assert package.value.package == "torch"
    with pytest.raises(
        ChildError, match=r"^the process that measured failed with ZeroDivisionError at turn_stand_in\.py:\d+: so"
    ) as crash:
        turn(tmp_path / "bug", EvalContext())
    assert crash.value.__notes__[0].startswith("\nIn the process that measured:\nTraceback (most recent")


def test_a_process_that_dies(stand_in: None, tmp_path: Path) -> None:
    with pytest.raises(
        ResourceError,
        match=r"^throughput: the process that measured was ended by the system\. .*memory runs out\. Lower",
    ):
        turn(tmp_path / "killed", EvalContext())
    with pytest.raises(
        EvalError,
        match=r"^throughput: the process that measured "
        r"ended with status 7 and without a result\. What it printed stands above\.$",
    ):
        turn(tmp_path / "lost", EvalContext())
    error = parent._ended(ChildEndedError("the process that measured", -11), "load")
    assert str(error).startswith("load: the process that measured was ended by SIGSEGV and without a result.")


def test_an_interrupt_lets_it_clean_up(stand_in: None, tmp_path: Path) -> None:
    progress = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        turn(tmp_path / "long", EvalContext(progress=progress))
    assert (tmp_path / "long").read_text() == "cleaned up"
    assert is_gone(progress.pid)


def test_settings_and_evals_survive_as_json() -> None:
    for value in (
        Attention(implementation="sdpa"),
        Speculative(prompt_lookup=2),
        Throughput(batch_sizes=(1, 2)),
        Load(rates=(0.5, 2)),
    ):
        assert restored(json.loads(json.dumps(described(value)))) == value


def test_a_turn_there_is_a_turn_here(tiny_model: Callable[[str], Path]) -> None:
    said = io.StringIO()
    order = {
        "directory": str(tiny_model("llama")),
        "settings": [described(Speculative(prompt_lookup=2))],
        "evals": [
            described(Throughput.model_validate(QUICK)),
            described(Load(requests=2, prompt=4, new_tokens=2, repeats=2, rates=(50,))),
        ],
        **{
            "device": "cpu",
            "trust_remote_code": False,
            "seed": 0,
            "data": None,
            "calibrated_on": [],
            "turn": 0,
            "threads": 1,
        },
    }
    throughput, load = child.run(order, Parent(said))
    assert {metric["name"] for metric in load["metrics"]} == set(Load.metrics)
    assert [note for note in throughput["notes"] if "warm-up runs" in note]
    assert throughput["environment"]["device"] == "cpu"
    assert '"label": "throughput, turn 1 of 2"' in said.getvalue()


def test_which_evals_ask_for_it() -> None:
    assert Throughput().apart()
    assert Roofline().apart()
    assert not Throughput(isolated=False).apart()
    assert Load().apart()
    assert Encoding().apart()
    assert Speculation(dataset="wikitext2").apart()
    assert "mean of 4 turns, each in a fresh process, alternating" in Throughput()._protocol(
        type("Session", (), {"device": "cpu"})(), 0
    )  # type: ignore[arg-type]


@pytest.mark.usefixtures("warm_children")
def test_throughput_is_measured_in_a_fresh_process(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Two starts of Python with torch."""
    recipe = f"model: {tiny_model('llama')}\nevals:\n  - throughput: {json.dumps(QUICK)}\n"
    progress = Lines()
    scorecard = evaluate(str(tiny_model("llama")), recipe, store=tmp_path / "store", progress=progress, device="cpu")
    rows = {row.metric.name: row.metric for row in scorecard.rows}
    assert rows["decode_tokens_per_s"].value > 0
    assert "each in a fresh process" in rows["decode_tokens_per_s"].protocol
    bars = [line for line in progress.lines if line.startswith("throughput, turn")]
    assert bars == ["throughput, turn 1 of 2 of 1 runs", "throughput, turn 2 of 2 of 1 runs"]
    assert len(rows["decode_tokens_per_s"].samples) == len(rows["decode_tokens_per_s"].repeats) == 2
    assert len(rows["peak_memory_bytes"].samples) == 2
    assert scorecard.environment["cpu_threads"] >= 1
    assert any("warm-up runs" in note for note in scorecard.notes)
