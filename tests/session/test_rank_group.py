import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.errors import EvalError, ResourceError, SourceError, StageError
from optkit.processes.child import Child
from optkit.progress import ToActOn, as_pairs, asking, of_pairs
from optkit.session import rank_group as ranks
from optkit.session.rank_group import RankGroup
from tests.support.waiting import ended

FAKE = str(Path(__file__).parents[1] / "support" / "fake_rank.py")


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PROGRAM", FAKE)
    monkeypatch.setattr("optkit.processes.child.GRACE_S", 0.3)


def start(mode: str = "", timeout_s: float = 20.0) -> RankGroup:
    return RankGroup(
        {"directory": mode, "settings": [], "dtype": None, "trust_remote_code": False}, ("cpu", "cpu"), timeout_s
    )


@pytest.fixture
def two() -> Iterator[RankGroup]:
    started = start()
    yield started
    started.close()


def test_every_call_goes_to_all_and_the_answers_come_in_order(two: RankGroup) -> None:
    assert [each["rank"] for each in two.opened] == [0, 1]
    assert two.call("echo", value="x") == [[0, "x"], [1, "x"]]
    pids = [each["pid"] for each in two.opened]
    two.close()
    assert ended(*pids)
    with pytest.raises(
        StageError, match=r"^tensor_parallel: its processes were ended\. Before, the session was closed\. Open it again"
    ):
        two.call("echo", value=1)


def test_what_all_refuse_is_an_error_after_which_they_go_on(two: RankGroup) -> None:
    with pytest.raises(EvalError, match=r"^somewhere: too long\.$"):
        two.call("fail")
    with pytest.raises(
        StageError, match=r"^tensor_parallel: process 1 of 2 \(cpu\) failed with ValueError at fake_rank\.py"
    ):
        two.call("raise")
    assert two.call("echo", value=1) == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "die",
            r"^tensor_parallel: process 2 of 2 \(cpu\) was ended by SIGKILL \(.*memory runs out\) "
            r"and without a result\. Its last words: the last words\.$",
        ),
        ("leave", r"^tensor_parallel: process 2 of 2 \(cpu\) ended with status 7 and without a result\. It said"),
        (
            "hang",
            r"^tensor_parallel: process 2 of 2 \(cpu\) did not answer within 1 s of the others\. .*NCCL_DEBUG=INFO",
        ),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_and_nobody_waits(call: str, message: str) -> None:
    two = start(timeout_s=1.0)
    pids = [each["pid"] for each in two.opened]
    with pytest.raises(StageError, match=message):
        two.call(call)
    assert ended(*pids)
    with pytest.raises(StageError, match=r"its processes were ended\. Before, process 2 of 2"):
        two.call("echo", value=1)


def test_what_keeps_a_model_from_being_opened_is_said_as_if_it_were_one_process() -> None:
    with pytest.raises(SourceError, match=r"^somewhere: weights are missing\.$"):
        start("refused")


def test_where_one_alone_has_no_memory_the_other_does_not_wait() -> None:
    with pytest.raises(ResourceError, match=r"^somewhere: out of memory\.$"):
        start("half refused")


def test_ctrl_c_ends_them_at_once(two: RankGroup) -> None:
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        two.call("stop here")
    assert ended(*(each["pid"] for each in two.opened))
    with pytest.raises(StageError, match="Before, it was interrupted"):
        two.call("echo", value=1)


def test_a_rank_ends_with_its_parent_before_it_has_imported_torch(tmp_path: Path) -> None:
    package = tmp_path / "optkit" / "session"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "rank_worker.py").write_text("import time\ntime.sleep(600)\n")  # as long as torch takes, and longer
    with Child("optkit.session.rank_worker", name="a rank", env={**os.environ, "PYTHONPATH": str(tmp_path)}) as child:
        with pytest.raises(TimeoutError):
            child.result(timeout_s=0.5)
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(60) == -signal.SIGKILL


def test_they_end_where_nobody_holds_them_any_more() -> None:
    pids = [each["pid"] for each in start().opened]
    gc.collect()
    assert ended(*pids)


def test_a_note_that_asks_someone_to_act_still_does_on_the_other_side() -> None:
    notes = ("plain", ToActOn("no fast kernel"))
    there = of_pairs(json.loads(json.dumps(as_pairs(notes))))
    assert (there, asking(there)) == (notes, ["no fast kernel"])
