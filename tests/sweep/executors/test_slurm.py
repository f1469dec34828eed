"""Executor `slurm`: jobs by submitit, run here as its own jobs and handed to a stand-in of sbatch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact import read_artifact
from optkit.errors import UsageError
from optkit.recipe.recipe import load_recipe
from optkit.sweep.executors.base import Needs, Order
from optkit.sweep.executors.slurm import Make, SlurmExecutor
from tests.support.remembered import Lines
from tests.support.sweeps import made, order_of

pytest.importorskip("submitit")
SBATCH = """#!/bin/sh
cat "$1" > {seen}
{says}
"""


def order(home: Path) -> Order:
    made = load_recipe("model: smollm2-135m\nevals: [footprint]\n")
    return Order("one", made, home / "s" / "one", "cpu", home / "store", None, needs=Needs(3, 2, 5 << 30))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return what puts a stand-in of sbatch into place, and the file that holds what it was given."""

    def put(says: str) -> Path:
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name in ("sbatch", "srun", "scancel"):
            (tmp_path / "bin" / name).write_text(SBATCH.format(seen=tmp_path / name, says=says))
            (tmp_path / "bin" / name).chmod(0o755)
        return tmp_path / "sbatch"

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return put


def test_a_job_leaves_an_artifact_and_what_it_said(
    tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path
) -> None:
    lines, wanted = Lines(), order_of(tmp_path, tiny_model("llama"), "one", letters)
    with SlurmExecutor({"cluster": "local"}) as executor:
        executor.begin(wanted)
        assert made(executor, wanted, lines).verdict == "PASS"
    read_artifact(wanted.out).check()
    assert "one: rtn of 3 blocks" in lines.lines
    assert not [*tmp_path.glob(".store-*")]


def test_sbatch_gets_what_the_plan_says_and_what_the_user_adds(
    tmp_path: Path, sbatch: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sbatch("echo Submitted batch job 12")
    with SlurmExecutor({"partition": "gpu", "time": "90", "mem": "7GB"}) as executor:
        executor.begin(order(tmp_path))
        asked = [line for line in seen.read_text().splitlines() if line.startswith("#SBATCH")]
    said = {"cpus-per-task=3", "gpus-per-node=2", "mem=7GB", "partition=gpu", "time=90", "job-name=one"}
    assert {f"#SBATCH --{each}" for each in said} <= {*asked}
    assert (tmp_path / "scancel").exists()


def test_what_sbatch_refuses_is_a_failure(tmp_path: Path, sbatch: Callable[[str], Path]) -> None:
    sbatch("echo no such partition >&2; exit 1")
    with SlurmExecutor() as executor:
        executor.begin(order(tmp_path))
        outcome = executor.ended(Lines(), None)["one"]
    assert outcome.reason.startswith("one: Slurm refuses the job: ")
    assert "no such partition" in outcome.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": "1:00:00"}, "--slurm time: '1:00:00' is no number of minutes. Write --slurm time=90."),
        ({}, "--executor slurm: there is no srun here. Run it where Slurm is, or try it with --slurm cluster=local."),
    ],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as error:
        SlurmExecutor(given).begin(order(tmp_path))
    assert str(error.value) == said


def test_a_job_that_is_preempted_is_queued_again_and_one_that_died_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 0)
    again = Make().checkpoint({"name": "one"}, tmp_path / "lines")
    assert isinstance(again.function, Make)
    assert again.args == ({"name": "one"}, tmp_path / "lines")
    executor: Any = SlurmExecutor({"cluster": "local"})
    with executor:
        wanted = order(tmp_path)
        executor.begin(wanted)
        executor._jobs["one"]._process.kill()
        outcome = executor.ended(Lines(), None)["one"]
    assert outcome.verdict is None
    assert outcome.reason.startswith("Slurm: Job ")


def test_a_job_that_waits_says_why_and_one_that_is_cancelled_ends(
    tmp_path: Path, sbatch: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch("echo Submitted batch job 12")
    for limit in ("LOOK_S", "GRACE_S"):
        monkeypatch.setattr(f"optkit.sweep.executors.slurm.{limit}", 0)
    lines, queue = Lines(), tmp_path / "bin" / "squeue"
    with SlurmExecutor() as executor:
        executor.begin(order(tmp_path))
        for state in ("7|RUNNING|None", "12|PENDING|Resources", "12|PENDING|Resources", "12|RUNNING|None"):
            queue.write_text(f"#!/bin/sh\necho '{state}'\n")
            queue.chmod(0o755)
            assert not executor.ended(lines, 0)
        queue.write_text("#!/bin/sh\nexit 1\n")
        assert not executor.ended(lines, 0)
        queue.write_text("#!/bin/sh\necho '12|CANCELLED|None'\n")
        outcome = executor.ended(lines, 0)["one"]
    assert lines.lines == ["one: waits in Slurm's queue: Resources"]
    assert outcome.reason == "Slurm: job 12 ended as CANCELLED without a result"


def test_a_job_that_is_never_listed_and_leaves_nothing_is_waited_for_so_long(
    tmp_path: Path, sbatch: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch("echo Submitted batch job 12")
    for limit, value in (("LOOK_S", 0), ("GRACE_S", 0), ("LOOKS", 3)):
        monkeypatch.setattr(f"optkit.sweep.executors.slurm.{limit}", value)
    queue = tmp_path / "bin" / "squeue"
    queue.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    queue.chmod(0o755)
    with SlurmExecutor() as executor:
        executor.begin(order(tmp_path))
        assert [executor.ended(Lines(), 0) for _ in range(3)] == [{}] * 3
        outcome = executor.ended(Lines(), 0)["one"]
    assert outcome.reason == (
        "Slurm: job 12 was not in the queue at 3 looks and ended without a result. Look at `sacct -j 12`, then run "
        "the sweep again"
    )
    assert f"--user={os.getuid()}" in (tmp_path / "asked").read_text()  # --me is of Slurm 20.02


def test_a_cluster_that_submitit_does_not_know(tmp_path: Path) -> None:
    order = Order("a", None, tmp_path / "out", "cpu", tmp_path / "store", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="^--slurm cluster: there is no cluster 'cloud'. Take slurm, local or debug"):
        SlurmExecutor({"cluster": "cloud"}).start(order)
