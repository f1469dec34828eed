"""How often a configuration is repeated, and which repeats count."""

import os
import sys

import pytest
from optkit_evals.throughput import Throughput

from optkit.common.statistics import mean, standard_error
from optkit.devices import cpu_watch
from optkit.devices.cpu_watch import CpuWatch, crowd, make_room
from optkit.measure import EvalContext, Turn
from tests.support.bigram_session import Said
from tests.support.metric_values import values
from tests.support.remembered import Lines

WARMING = ["warming up, batch 1, prompt 4 of 0 runs", "+1", "+1", "end"]


def test_warm_up_goes_on_until_the_running_mean_stands_still(session, clock):
    clock.slow_answers = {1: 60.0, 2: 5.0, 3: 1.5}
    context = EvalContext()
    metrics = Throughput(new_tokens=2, prompts=(4,), repeats=2, warmup=1).run(session, context)
    assert clock.answers == 6 + 2  # the means are 32.5, 3.25, 1.25, 1, 1
    assert context.notes == ["throughput, batch 1, prompt 4, 2 new tokens: 6 warm-up runs, 2 repeats"]
    assert values(metrics)["time_to_first_token_s"] == pytest.approx(0.5)


def test_warm_up_ends_at_the_time_limit(session, clock):
    clock.slow_answers = {run: float(run) for run in range(100)}
    context = EvalContext()
    Throughput(new_tokens=2, prompts=(4,), repeats=2, warmup=1, limit_s=10, interval=0.9).run(session, context)
    assert clock.answers == 6 + 1  # 0.6 s x (2 + 3 + 4 + 5 + 6) are 12 s beyond the first: the limit is over
    assert "6 warm-up runs, and their running mean still moves by more than 3%" in context.notes[0]
    assert context.notes[1].endswith("6 warm-up runs, 1 repeats of 2, since limit_s was over")


def test_answers_that_take_long_end_a_turn_soon(session, clock, monkeypatch):
    clock.slow_answers = {run: 30.0 + 5 * (run % 2) for run in range(100)}
    monkeypatch.setattr(CpuWatch, "others", lambda self, before: 0.9)
    context = EvalContext(turn=Turn(0, 4))
    Throughput(new_tokens=2, prompts=(4,)).run(session, context)
    assert clock.answers == 2 + 1 + 1, "a warm-up, a run beyond it that takes the turn's 15 s, one repeat"
    assert "other processes used more than 5% of the cores during 1 of 1 repeats" in context.warnings[-1]


def test_repeats_go_on_until_the_mean_of_the_turn_is_certain(session, clock):
    clock.slow_answers = {3: 1.0, 4: 1.1}
    throughput = Throughput(new_tokens=2, prompts=(4,), repeats=2, interval=0.04)
    metrics = throughput.run(session, EvalContext())
    first = next(metric for metric in metrics if metric.name == "time_to_first_token_s")
    assert len(first.samples) == 3
    errors = [standard_error(first.samples[:count]) / mean(first.samples[:count]) for count in (2, 3)]
    assert errors[0] > 0.04 >= errors[1]


def test_repeats_end_at_four_times_as_many_or_at_the_time_limit(session, clock):
    clock.slow_answers = {run: 2.0 - run % 2 for run in range(3, 100)}
    metrics = Throughput(new_tokens=2, prompts=(4,), repeats=3).run(session, EvalContext())
    assert len(metrics[0].samples) == 12
    clock.answers = 0
    metrics = Throughput(new_tokens=2, prompts=(4,), repeats=3, limit_s=3.5).run(session, EvalContext())
    assert len(metrics[0].samples) == 4  # 0.6 + 1.2 + 0.6 + 1.2 s


def test_a_quiet_machine_is_not_warned_about(session, clock):
    context = EvalContext(progress=Said())
    throughput = Throughput(new_tokens=2, prompts=(4,), repeats=3)
    throughput.pool([throughput.run(session, context)], context)
    assert context.progress.warnings == []  # type: ignore[attr-defined]
    assert len(context.notes) == 1


def test_a_turn_of_one_repeat_makes_a_second_one_because_one_has_no_interval(session, clock):
    throughput = Throughput(new_tokens=2, prompts=(4,), repeats=2)
    turns = [throughput.run(session, EvalContext(turn=Turn(index, 2))) for index in range(2)]
    assert [len(turn[0].samples) for turn in turns] == [2, 2]
    alone = throughput.model_copy(update={"limit_s": 0.1}).run(session, EvalContext(turn=Turn(0, 2)))
    assert alone[0].samples == pytest.approx((8.0,))
    assert alone[0].interval is None


def test_the_warm_up_is_seen(session, clock):
    shown = Lines()
    Throughput(new_tokens=2, prompts=(4,), repeats=2).run(session, EvalContext(progress=shown, turn=Turn(1, 2)))
    assert shown.lines == [
        "throughput, turn 2 of 2 of 1 runs",
        *WARMING,
        "+1 batch 1, prompt 4",
        "+0 batch 1, prompt 4",
        "end",
    ]


@pytest.mark.parametrize(("disturbed", "kept"), [({2, 3}, 4), ({1}, 4), (set(), 4), (set(range(1, 16)), 16)])
def test_repeats_that_others_disturb_are_left_out(session, clock, monkeypatch, disturbed, kept):
    clock.slow_answers = {2 + number: 5.0 for number in disturbed}
    monkeypatch.setattr(CpuWatch, "others", lambda self, before: 0.5 if clock.answers - 2 in disturbed else 0.05)
    context = EvalContext(progress=Said())
    metrics = Throughput(prompts=(4,), new_tokens=3, repeats=4, warmup=1, limit_s=1000).run(session, context)
    first = next(metric for metric in metrics if metric.name == "time_to_first_token_s")
    assert len(first.samples) == kept
    going_on = [line for line in context.progress.warnings if "repeats go on for up to 999 s" in line]  # type: ignore[attr-defined]
    assert len(going_on) == bool(disturbed)
    told = [note for note in context.notes if "of the cores" in note]
    if kept == 4:
        assert first.value == pytest.approx(0.5)
        wanted = f"{len(disturbed)} repeats are left out, during which other processes used more than 5% of the cores"
        assert told == [f"throughput, batch 1, prompt 4: {wanted}"] * bool(disturbed)
    else:
        said = (
            "other processes used more than 5% of the cores during 15 of 16 repeats; run again with "
            "--retime on a quiet machine"
        )
        assert told == [f"throughput, batch 1, prompt 4: {said}"]


@pytest.mark.parametrize(("others", "policy", "wanted"), [(0.9, None, 0.9), (0.2, None, 0.0), (0.9, "ACTIVE", 0.0)])
def test_threads_make_room_in_a_crowd(tmp_path, monkeypatch, others, policy, wanted):
    (tmp_path / "torch.py").write_text("import os\npolicy = os.environ.get('OMP_WAIT_POLICY')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(cpu_watch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(CpuWatch, "others", lambda self, before: others)
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    said = Lines()
    assert crowd() == wanted
    make_room(said)
    if wanted:
        assert sys.modules["torch"].policy == "PASSIVE"
        assert said.lines == ["other programs use 90% of the cores, so threads sleep while they wait"]
    assert ("torch" in sys.modules) == bool(wanted)
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    make_room(said)
    assert len(said.lines) == bool(wanted), "torch is there"


def test_what_others_used_is_counted_on_our_cores_alone(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    monkeypatch.setattr("optkit.devices.cpu_watch.time.process_time", lambda: own_s)

    def write(*rows):
        lines = [f"cpu{core} {' '.join(map(str, row))}" for core, row in enumerate(rows)]
        stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]))

    own_s, idle = 1.0, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    write(idle, idle, idle)
    watch = CpuWatch(stat)
    before = watch.now()
    own_s = 1.0 + 30 / os.sysconf("SC_CLK_TCK")
    write((30, 0, 0, 70, 0, 0, 0, 0, 0, 0), (100, *idle[1:]), (10, 5, 5, 60, 10, 2, 3, 5, 0, 0))
    assert watch.others(before) == pytest.approx(30 / 200)
    write((10, *idle[1:]), idle, idle)
    assert watch.others(before) == 0.0
    assert CpuWatch(tmp_path / "none").others(CpuWatch(tmp_path / "none").now()) == 0.0
