import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optkit_evals import load, serving, timing
from optkit_evals.load import Load
from optkit_evals.serving import Request, Served, poisson_requests, serve_continuously, serve_static

from optkit.common.statistics import quantile
from optkit.errors import EvalError
from optkit.measure import EvalContext, Metric, Turn
from optkit.progress import SilentTask
from optkit.scorecard import ratio_to_baseline
from optkit.session import open_session
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from tests.support.bigram_session import BigramSession, Said

TASK = SilentTask()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the session and sleeping move: 1 s for the first token of a batch, 0.25 s for
    each further one.
    """
    clock = SimpleNamespace(now=100.0, batches=[])

    def tick(batch: int, index: int) -> None:
        clock.now += 1.0 if index == 0 else 0.25
        if index == 0:
            clock.batches.append(batch)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock.session = BigramSession()
    clock.session.on_token = tick
    monkeypatch.setattr(serving.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(serving.time, "sleep", sleep)
    return clock


def requests_at(*arrivals: float) -> list[Request]:
    return [Request(arrival, torch.ones(1, 4, dtype=torch.int64)) for arrival in arrivals]


def test_arrivals_are_a_seeded_poisson_process() -> None:
    session = BigramSession()
    found = poisson_requests(session, 4.0, 2000, 3, seed=1)
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    # as of an exponential
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert found[0].arrival_s == random.Random(1).expovariate(4.0)
    assert [each.arrival_s for each in poisson_requests(session, 4.0, 5, 3, seed=1)] == [
        each.arrival_s for each in found[:5]
    ]
    assert found[0].tokens.shape == (1, 3)
    assert not found[0].tokens.equal(found[1].tokens)


def test_a_static_batch_ends_before_the_next_begins(clock: SimpleNamespace) -> None:
    served = serve_static(clock.session, requests_at(0.5, 0.6, 1.4, 1.45, 1.5, 9.0), 3, 2, TASK)
    # alone at 0.5 until 2.0; two of the four that wait until 3.5; the others until 5.0; the last
    # one comes to an idle machine
    assert clock.batches == [1, 2, 2, 1]
    assert [each.token_times_s for each in served] == [
        pytest.approx(times)
        for times in (
            (1.5, 1.75, 2.0),
            (3.0, 3.25, 3.5),
            (3.0, 3.25, 3.5),
            (4.5, 4.75, 5.0),
            (4.5, 4.75, 5.0),
            (10.0, 10.25, 10.5),
        )
    ]
    assert [each.first_token_s for each in served] == pytest.approx([1.0, 2.4, 1.6, 3.05, 3.0, 1.0])


def test_percentiles_and_goodput() -> None:
    served = [Served(float(index), (index + 0.5 + 0.1 * index, index + 1.0 + 0.1 * index)) for index in range(5)]
    eval = Load(new_tokens=2, first_token_limit_s=0.75, inter_token_limit_s=0.5)
    found = eval._summary(served)
    assert found["load_first_token_p50_s"] == pytest.approx(0.7)
    assert found["load_first_token_p99_s"] == pytest.approx(0.896)
    assert found["load_inter_token_p95_s"] == pytest.approx(0.5)
    assert found["load_tokens_per_s"] == pytest.approx(10 / 5.4)
    assert found["goodput_fraction"] == pytest.approx(3 / 5)
    assert found["goodput_requests_per_s"] == pytest.approx(3 / 5.4)
    assert eval.model_copy(update={"inter_token_limit_s": 0.4})._summary(served)["goodput_fraction"] == 0.0


def test_every_rate_has_its_rows(clock: SimpleNamespace) -> None:
    eval = Load(rates=(0.001, 2), requests=4, prompt=4, new_tokens=3, batch=2)
    metrics = eval.run(clock.session, EvalContext())
    assert {metric.name for metric in metrics} == set(Load.metrics)
    rows = [tuple(metric.labels.values()) for metric in metrics if metric.name == "load_tokens_per_s"]
    assert (
        rows == [tuple(row.values()) for row in eval.row_labels()] == [("0.001", 4, 3, "static"), (2, 4, 3, "static")]
    )
    slow, fast = (metric for metric in metrics if metric.name == "load_first_token_p95_s")
    assert slow.value == pytest.approx(1.0)
    assert len(slow.samples) == 8
    assert fast.value > slow.value


def test_no_interval_reaches_below_0_or_beyond_all_requests() -> None:
    eval = Load(requests=10)

    def pooled(name: str, *values: float) -> Metric:
        return eval.pool([[eval._metric(name, 1.0, [value], "", (value,))] for value in values], EvalContext())[0]

    assert pooled("load_first_token_p99_s", 0.1, 0.9, 0.2).interval[0] == 0.0  # type: ignore[index]
    assert pooled("goodput_fraction", 0.9, 0.2, 0.6).interval == (0.0, 1.0)


def test_the_median_is_that_of_all_requests() -> None:
    """And no interval of a percentile is narrower than that of the order of their times."""
    eval = Load(requests=100)
    turns = [tuple(index / 100 + place for index in range(100)) for place in (0.0, 0.0, 5.0)]

    def pooled(name: str, *values: float) -> Metric:
        metrics = [[eval._metric(name, 1.0, [value], "", turn)] for value, turn in zip(values, turns, strict=True)]
        return eval.pool(metrics, EvalContext())[0]

    median = pooled("load_first_token_p50_s", 0.5, 0.5, 0.5)
    assert median.value == pytest.approx(0.745)
    assert (median.samples, median.pairing) == (tuple(quantile(turn, 0.5) for turn in turns), "independent")
    assert median.interval[0] == 0.0  # type: ignore[index]
    tail = pooled("load_first_token_p99_s", 4.0, 4.0, 4.0)
    assert (tail.value, tail.interval, tail.repeats) == (4.0, (4.0, 5.99), ((4.0,),) * 3)


def test_the_protocol_says_how_many_threads_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "describe_environment", lambda device: THREADS if device == "cpu" else GPU)
    assert Load()._protocol(BigramSession(), 0).endswith("; X, 3 threads, torch 2")
    assert timing.device_text("cuda:0") == "H200, torch 2"


THREADS = {"device_name": "X", "cpu_threads": 3, "torch": "2"}
GPU = {**THREADS, "device_name": "H200"}


def test_requests_that_all_kept_the_limits_do_not_make_goodput_certain() -> None:
    eval = Load(requests=10)
    (fraction,) = eval.pool([[eval._metric("goodput_fraction", 1.0, [1.0], "")] for _ in range(4)], EvalContext())
    assert (fraction.value, fraction.samples, fraction.trials) == (1.0, (1.0,) * 4, (10,) * 4)
    assert fraction.interval == pytest.approx((0.025 ** (1 / 40), 1.0))
    ratio = ratio_to_baseline(fraction, fraction)
    assert ratio.value == 1.0
    assert ratio.interval == pytest.approx((0.025 ** (1 / 40), 0.025 ** (-1 / 40)))


def test_turns_share_the_repeats(clock: SimpleNamespace) -> None:
    eval = Load(requests=3, prompt=4, new_tokens=2, repeats=3)
    turns = [eval.run(clock.session, EvalContext(turn=Turn(index, 2))) for index in range(2)]
    assert [len(turn[0].samples) for turn in turns] == [2, 1]
    whole = eval.run(clock.session, EvalContext())
    pooled = eval.pool(turns, EvalContext())[0]
    assert sorted(sample for repeats in pooled.repeats for sample in repeats) == pytest.approx(sorted(whole[0].samples))
    assert (eval.turns(), Load().turns()) == (3, 4)


def test_a_model_that_does_not_keep_up_is_said(clock: SimpleNamespace) -> None:
    context = EvalContext(progress=Said())
    Load(rates=(5,), requests=12, prompt=4, new_tokens=3, batch=1).run(clock.session, context)
    assert "load at 5 requests/s: the last one arrived after " in context.notes[0]
    assert "waiting grows with the number of requests" in context.notes[0]


def test_more_tokens_than_positions() -> None:
    with pytest.raises(EvalError, match="load: a prompt of 60 and 5 new tokens are more than the model's 64 positions"):
        Load(prompt=60, new_tokens=5).run(BigramSession(), EvalContext())


def test_continuous_batching_generates_what_the_model_does(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(tiny_model("llama"))
    before = session.model.config._attn_implementation
    requests = poisson_requests(session, 200.0, 6, 9, seed=0)
    served = serve_continuously(session, requests, 7, 3, TASK)
    assert session.model.config._attn_implementation == before
    for request, each in zip(requests, served, strict=True):
        assert session.generate(request.tokens, 7)[0, 9:].tolist() == list(each.tokens)
        assert len(each.token_times_s) == 7
        assert each.arrival_s < each.token_times_s[0] < each.end_s


def test_continuous_batching_under_load(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(tiny_model("llama"))
    context = EvalContext(progress=Said())
    eval = Load(rates=(50,), requests=4, prompt=6, new_tokens=3, batch=2, batching="continuous")
    found = {metric.name: metric.value for metric in eval.run(session, context)}
    assert found["load_tokens_per_s"] > 0
    told = context.progress.warnings  # type: ignore[attr-defined]
    assert not [line for line in told if "generates other" in line]  # a busy machine may be said to fall behind
    monkeypatch.setattr(session, "generate", lambda tokens, new: torch.zeros(1, 9, dtype=torch.int64))
    eval._warm_up(session, context)
    assert "load: transformers' engine generates other tokens than the model alone, from token 1 of 3 on" in told[-1]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ((KvCache(dtype="int8"),), "Its KV cache would be one of floats"),
        ((Speculative(prompt_lookup=2),), "It would decode token by token"),
    ],
)
def test_settings_that_the_engine_would_leave_out_are_refused(
    tiny_model: Callable[[str], Path], settings: tuple, why: str
) -> None:
    session = open_session(tiny_model("llama"), settings)
    with pytest.raises(
        EvalError, match=rf"^load: continuous batching does not apply to this session\. {why}\. Set batching: static"
    ):
        Load(requests=2, prompt=4, new_tokens=2, batching="continuous").run(session, EvalContext())


def test_paged_attention_without_a_soft_cap_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(
        EvalError, match=r"The paged attention of transformers leaves out the soft cap of the scores\. Set batching"
    ):
        serving.refuse_other_engines(open_session(tiny_model("gemma2")))
    for kind in ("llama", "gpt_oss"):
        serving.refuse_other_engines(open_session(tiny_model(kind)))


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "bamba"])
def test_models_that_keep_something_else_than_keys_and_values_are_refused(
    tiny_model: Callable[[str], Path], kind: str
) -> None:
    with pytest.raises(
        EvalError,
        match=r"Its pages hold keys and values, and the model keeps a state of another kind\. Set batching: static",
    ):
        serving.refuse_other_engines(open_session(tiny_model(kind)))


def test_other_engines_are_refused() -> None:
    with pytest.raises(EvalError, match="this model is not opened by it"):
        Load(prompt=4, new_tokens=2, batching="continuous").run(BigramSession(), EvalContext())
    with pytest.raises(EvalError, match="without the kernels that decode it here"):
        serving.refuse_other_engines(SimpleNamespace(model=None, compiled=False, decodes_itself=True))
    compiled = SimpleNamespace(model=None, compiled=True)
    with pytest.raises(EvalError, match="without the compiled step"):
        serving.refuse_other_engines(compiled)


def test_an_engine_that_stops_is_an_error() -> None:
    status = SimpleNamespace(fatal_error=RuntimeError("no blocks"))
    with pytest.raises(
        EvalError,
        match=r"transformers' continuous batching has stopped\. RuntimeError: no blocks\. Set batching: static",
    ):
        serving._check_running(SimpleNamespace(background_thread_status=status, is_running=lambda: True))
    ended = SimpleNamespace(background_thread_status=SimpleNamespace(fatal_error=None), is_running=lambda: False)
    with pytest.raises(EvalError, match="Its thread has ended"):
        serving._check_running(ended)


def test_fields_that_mean_nothing_are_refused() -> None:
    for fields in (
        {"rates": ()},
        {"rates": (0,)},
        {"requests": 1},
        {"batch": 0},
        {"batching": "dynamic"},
        {"repeats": 1},
    ):
        with pytest.raises(ValueError, match="Input should be|at least|greater"):
            Load(**fields)
    assert load.UNITS.keys() == set(Load.metrics)
