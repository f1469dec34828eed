import mmap
import re
from dataclasses import replace

import pytest
import torch
from optkit_evals import timing
from optkit_evals.throughput import Throughput

from optkit.devices import peak_memory
from optkit.errors import EvalError, ResourceError
from optkit.measure import EvalContext, Turn
from optkit.recipe.gates import Verdict
from optkit.scorecard import build_scorecard
from tests.support.bigram_session import Said
from tests.support.metric_values import values

LIMITS = {"peak_memory_bytes": "<= 1e15", "peak_memory_bytes[batch=8]": "<= 1e15"}
REMEDY = "run again with --retime on a quiet machine"


def test_prefill_and_decode_apart(session, clock):
    metrics = Throughput(batch_sizes=(4,), prompts=(10,), new_tokens=6, repeats=3).run(session, EvalContext())
    found = values(metrics)
    assert set(found) == set(Throughput.metrics) - {"peak_reserved_bytes", "energy_per_token_j"}
    assert found["time_to_first_token_s"] == pytest.approx(0.5)
    assert found["prefill_tokens_per_s"] == pytest.approx(4 * 10 / 0.5)
    assert found["decode_tokens_per_s"] == pytest.approx(4 * 5 / 0.5)
    assert found["inter_token_p50_s"] == found["inter_token_p99_s"] == pytest.approx(0.1)
    assert found["decode_bytes_per_s"] == pytest.approx((1000 + 4 * 13) / 0.1)
    assert all(metric.labels == {"batch": 4, "prompt": 10, "new_tokens": 6} for metric in metrics)


def test_the_repeats_of_a_turn_are_kept_and_say_nothing_about_other_turns(session, clock):
    clock.slow_answers = {3: 1.0, 4: 1.1, 5: 1.2}
    metrics = Throughput(new_tokens=3, prompts=(8,), repeats=3, interval=0.9).run(session, EvalContext())
    first = next(metric for metric in metrics if metric.name == "time_to_first_token_s")
    assert first.samples == pytest.approx((0.5, 0.55, 0.6))
    assert first.value == pytest.approx(0.55)
    assert first.interval is None
    assert first.pairing == "paired_turns"


def test_every_batch_with_every_prompt(session, clock):
    metrics = Throughput(batch_sizes=(1, 2), prompts=(4, 8), new_tokens=2, repeats=2).run(session, EvalContext())
    rows = [
        (metric.labels["batch"], metric.labels["prompt"]) for metric in metrics if metric.name == "decode_tokens_per_s"
    ]
    assert rows == [(1, 4), (1, 8), (2, 4), (2, 8)]


def test_a_machine_that_never_settles_is_said_on_the_terminal_and_in_the_scorecard(session, clock):
    clock.slow_answers = {run: 1.0 + run // 2 % 2 for run in range(12)} | {run: 1.0 + run % 2 for run in range(12, 100)}
    context = EvalContext(progress=Said())
    throughput = Throughput(new_tokens=2, prompts=(4,), repeats=3)
    throughput.run(session, context)
    assert clock.answers == 12 + 12
    (settling,) = context.progress.warnings  # type: ignore[attr-defined]
    assert context.notes[0] == settling
    assert settling.startswith(
        "throughput, batch 1, prompt 4: 12 warm-up runs, and their running mean still moves by more than 3%"
    )
    assert context.notes[1] == "throughput, batch 1, prompt 4, 2 new tokens: 12 warm-up runs, 12 repeats"


def test_turns_share_the_repeats_and_make_one_measurement(session, clock):
    throughput = Throughput(new_tokens=3, prompts=(8,), repeats=5)
    context = EvalContext(progress=Said())
    # answers 1 to 5 are the first turn's, with its two warm-up runs
    clock.slow_answers = dict.fromkeys(range(6, 12), 1.5)
    turns = [throughput.run(session, replace(context, turn=Turn(index, 2))) for index in range(2)]
    first = [next(metric for metric in turn if metric.name == "time_to_first_token_s") for turn in turns]
    assert [metric.samples for metric in first] == [pytest.approx((0.5,) * 3), pytest.approx((0.75,) * 3)]
    pooled = throughput.pool(turns, context)
    assert [metric.name for metric in pooled] == [metric.name for metric in turns[0]]
    both = next(metric for metric in pooled if metric.name == "time_to_first_token_s")
    assert both.samples == pytest.approx((0.5, 0.75))
    assert [len(repeats) for repeats in both.repeats] == [3, 3]
    assert both.value == pytest.approx(0.625)
    assert both.interval[1] - both.value == pytest.approx(12.7062 * 0.125, rel=1e-4)
    peaks = [next(metric.value for metric in turn if metric.name == "peak_memory_bytes") for turn in turns]
    peak = next(metric for metric in pooled if metric.name == "peak_memory_bytes")
    assert (peak.samples, peak.value, peak.pairing) == (tuple(peaks), sum(peaks) / 2, "paired_turns")
    assert context.progress.warnings == [  # type: ignore[attr-defined]
        f"throughput, batch 1, prompt 8: the times of the 2 turns spread by 28% of their mean; {REMEDY}"
    ]


def test_rows_and_lengths_are_known_before_anything_runs():
    throughput = Throughput(batch_sizes=(1, 4), prompts=(8,), new_tokens=2)
    assert throughput.row_labels() == (
        {"batch": 1, "prompt": 8, "new_tokens": 2},
        {"batch": 4, "prompt": 8, "new_tokens": 2},
    )
    assert throughput.longest_sequence() == 10
    several = Throughput(batch_sizes=(2,), prompts=(8, 9), new_tokens=(2, 4))
    assert [tuple(row.values()) for row in several.row_labels()] == [(2, 8, 2), (2, 8, 4), (2, 9, 2), (2, 9, 4)]
    assert several.longest_sequence() == 13


def test_the_prompt_is_seeded_and_within_the_vocabulary(session):
    tokens = timing.random_tokens(session, 3, 200, seed=1)
    assert tokens.shape == (3, 200)
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 0
    assert tokens.max() == session.vocabulary - 1
    assert tokens.equal(timing.random_tokens(session, 3, 200, seed=1))
    assert not tokens.equal(timing.random_tokens(session, 3, 200, seed=2))


def test_more_tokens_than_positions(session):
    with pytest.raises(EvalError, match="a prompt of 60 and 5 new tokens are more than the model's 64 positions"):
        Throughput(prompts=(4, 60), new_tokens=5).run(session, EvalContext())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        ResourceError("out of memory at new token 1 of 8 x 4 tokens on cpu", where="model", why="no room"),
    ],
)
def test_out_of_memory_marks_a_configuration_and_goes_on(session, clock, error):
    def fail(batch: int, index: int) -> None:
        if batch == 8:
            raise error
        clock.tick(batch, index)

    session.on_token = fail
    context = EvalContext(progress=Said())
    throughput = Throughput(batch_sizes=(8, 1), prompts=(4,), new_tokens=2, repeats=2)
    found = throughput.pool([throughput.run(session, context)], context)
    message = "throughput at batch 8, prompt 4: memory ran out on cpu. Lower batch_sizes, prompts or new_tokens."
    assert context.progress.warnings == [message]  # type: ignore[attr-defined]
    failed = [metric for metric in found if metric.labels["batch"] == 8]
    assert {metric.name for metric in failed} == {metric.name for metric in found if metric.labels["batch"] == 1}
    assert "peak_memory_bytes" in {metric.name for metric in failed}
    (peak,) = (
        row
        for row in build_scorecard(name="s", artifact_key="", recipe={}, metrics=found, gates=LIMITS).rows
        if row.gates[1:]
    )
    assert {(gate.key, gate.verdict, gate.why) for gate in peak.gates} == {
        (key, Verdict.FAIL, "memory ran out on cpu") for key in LIMITS
    }
    assert {(metric.value, metric.failure, metric.samples) for metric in failed} == {(0.0, "memory ran out on cpu", ())}
    assert all(metric.value and not metric.failure for metric in found if metric.labels["batch"] == 1)
    with pytest.raises(ResourceError, match=re.escape(message)):
        Throughput(batch_sizes=(8,), prompts=(4,), new_tokens=2).run(session, EvalContext())


def test_other_errors_pass_unchanged(session):
    def fail(batch: int, index: int) -> None:
        raise RuntimeError("shapes differ")

    session.on_token = fail
    with pytest.raises(RuntimeError, match="shapes differ"):
        Throughput(prompts=(4,), new_tokens=2).run(session, EvalContext())


def test_peak_memory_is_that_of_the_repeats(session):
    if not (peak_memory.PROCESS / "clear_refs").exists():
        pytest.skip("the system has no clear_refs")
    held = []

    def hold(batch: int, index: int) -> None:
        held.clear()
        # not from the heap, where freed memory stays resident
        held.append(mmap.mmap(-1, 64 << 20 if batch == 2 else 1))
        for page in range(0, len(held[0]), mmap.PAGESIZE):
            held[0][page] = 1

    session.on_token = hold
    metrics = Throughput(batch_sizes=(2, 1), prompts=(4,), new_tokens=2, repeats=2).run(session, EvalContext())
    large, small = (metric.value for metric in metrics if metric.name == "peak_memory_bytes")
    assert large - small > 48 << 20


def test_a_peak_that_cannot_be_known_is_left_out_and_said(session, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(peak_memory, "PROCESS", tmp_path / "none")
    said = Said()
    metrics = Throughput(prompts=(4,), new_tokens=2).run(session, EvalContext(progress=said))
    assert "peak_memory_bytes" not in values(metrics)
    assert (
        "peak_memory_bytes is not reported: the system "
        "cannot reset the resident-set high-water mark" in said.warnings[0]
    )
    monkeypatch.setattr(peak_memory, "PROCESS", tmp_path)
    (tmp_path / "status").write_text("VmRSS:\t 12 kB\n")
    Throughput(prompts=(4,), new_tokens=2).run(session, EvalContext(progress=said))
    assert "there is no VmHWM in" in said.warnings[1]


def test_the_protocol_states_what_was_timed(session, clock):
    found = Throughput(prompts=(4,), new_tokens=2, repeats=2, warmup=3).run(session, EvalContext(seed=5))
    (protocol,) = {metric.protocol for metric in found}
    assert "memory is the largest resident set of the process during the repeats" in protocol
    for part in (
        "seed 5",
        "greedy",
        "3 warm-up runs",
        "mean of 4 turns, each in a fresh process",
        "mean of 1 repeats",
        "within 2%",
        "wall clock",
        "threads, torch " + torch.__version__.partition("+")[0],
    ):
        assert part in protocol


def test_fields_that_mean_nothing_are_refused():
    for fields in (
        {"batch_sizes": ()},
        {"batch_sizes": (0,)},
        {"prompts": (0,)},
        {"new_tokens": 1},
        {"repeats": 1},
        {"warmup": 0},
        {"new_tokens": ()},
        {"interval": 0},
        {"limit_s": 0},
    ):
        with pytest.raises(ValueError, match="Input should be|at least"):
            Throughput(**fields)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    with peak_memory.watched_peak("cuda") as peak:
        held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del held
    assert peak.size_bytes >= 64 << 20
