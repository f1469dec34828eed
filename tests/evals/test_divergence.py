import math
import random

import pytest
from optkit_evals.divergence import Divergence

from optkit.errors import EvalError
from optkit.measure import EvalContext
from tests.support.bigram_session import BigramSession

LETTERS = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=300))


def softmax(row: list[float]) -> list[float]:
    total = math.fsum(map(math.exp, row))
    return [math.exp(each) / total for each in row]


def moved(session: BigramSession, by: float) -> BigramSession:
    other = BigramSession()
    other.table = session.table + by * BigramSession(seed=9).table
    return other


def test_every_number_by_hand(text, monkeypatch):
    monkeypatch.setattr("optkit_evals.windows.SLICE_BYTES", 10 * 4 * 32)
    baseline = BigramSession()
    session = moved(baseline, 0.7)
    kl, p99, top1 = Divergence(dataset=text, window=32).run(session, EvalContext(baseline=baseline))
    ids = [ord(letter) % 32 for letter in LETTERS]
    per_window, same = [], []
    for start in range(0, 288, 32):
        divergences, agreed = [], 0
        for token in ids[start : start + 31]:
            expected, found = softmax(baseline.table[token].tolist()), softmax(session.table[token].tolist())
            divergences.append(math.fsum(p * math.log(p / q) for p, q in zip(expected, found, strict=True)))
            agreed += expected.index(max(expected)) == found.index(max(found))
        per_window.append(divergences)
        same.append(agreed / 31)
    means = [math.fsum(each) / 31 for each in per_window]
    assert kl.samples == pytest.approx(means, rel=1e-4)
    assert kl.value == pytest.approx(math.fsum(means) / 9, rel=1e-4)
    assert kl.interval[0] < kl.value < kl.interval[1]
    pooled = sorted(value for each in per_window for value in each)
    place = 0.99 * (len(pooled) - 1)
    assert p99.value == pytest.approx(
        pooled[int(place)] + (place % 1) * (pooled[int(place) + 1] - pooled[int(place)]), rel=1e-4
    )
    assert p99.interval[0] <= p99.value <= p99.interval[1]
    assert top1.samples == pytest.approx(same)
    assert top1.value == pytest.approx(math.fsum(same) / 9)
    assert 0 <= top1.interval[0] < top1.value < top1.interval[1] <= 1
    assert [metric.name for metric in (kl, p99, top1)] == list(Divergence.metrics)
    assert "279 tokens counted" in kl.protocol


def test_a_model_does_not_differ_from_itself(text):
    kl, p99, top1 = Divergence(dataset=text, window=32).run(BigramSession(), EvalContext(baseline=BigramSession()))
    assert (kl.value, p99.value, top1.value) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6), 1.0)
    assert kl.interval[0] >= 0


def test_it_is_the_baselines_divergence_from_the_model_and_not_the_other_way_round(text):
    baseline, session = BigramSession(), moved(BigramSession(), 2.0)
    there = Divergence(dataset=text, window=32).run(session, EvalContext(baseline=baseline))[0].value
    back = Divergence(dataset=text, window=32).run(baseline, EvalContext(baseline=session))[0].value
    assert there != pytest.approx(back, rel=0.01)


def test_what_cannot_be_compared(text):
    eval_ = Divergence(dataset=text, window=32)
    with pytest.raises(EvalError, match="divergence: there is no baseline"):
        eval_.run(BigramSession(), EvalContext())
    with pytest.raises(EvalError, match="the model has 32 logits and the baseline 31"):
        eval_.run(BigramSession(), EvalContext(baseline=BigramSession(vocabulary=31)))
    with pytest.raises(EvalError, match="read the text as different tokens"):
        eval_.run(BigramSession(), EvalContext(baseline=BigramSession(before="!")))
    with pytest.raises(EvalError, match="longer than the model's 16 positions"):
        eval_.run(BigramSession(), EvalContext(baseline=BigramSession(positions=16)))


@pytest.mark.parametrize("of_baseline", [True, False])
def test_logits_that_are_not_numbers(text, of_baseline):
    damaged = BigramSession()
    damaged.table[5, 3] = float("nan")
    sessions = (BigramSession(), damaged) if of_baseline else (damaged, BigramSession())
    with pytest.raises(EvalError, match="the divergence at a token is NaN or Inf"):
        Divergence(dataset=text, window=32).run(sessions[0], EvalContext(baseline=sessions[1]))


def test_it_needs_the_baseline_and_names_its_metrics():
    assert Divergence.compares
    assert not Divergence.timed
