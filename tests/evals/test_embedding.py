"""The evals of encoders on sessions that are made up, so that every number is known beforehand."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optkit_evals.embedding import Embedding, neighbour_recall, pairwise, spearman
from optkit_evals.encoding import Encoding, Timed
from optkit_evals.sentences import split_sentences
from optkit_evals.timing import random_tokens
from torch import Tensor

from optkit.errors import EvalError, ResourceError
from optkit.measure import EvalContext, Metric, Turn
from optkit.recipe.gates import check_gate, parse_gate

SENTENCES = 12


class MadeUp:
    """An encoder whose embedding of a text is one seeded vector for each of its tokens, plus some
    noise.
    """

    directory, device, vocabulary, positions, hidden_memory = Path("made-up"), "cpu", 256, 64, ""
    notes: tuple[str, ...] = ()
    trust_remote_code = False

    def __init__(
        self, noise: float = 0.0, pooling: str = "mean of the tokens", shift: int = 0, width: int = 16
    ) -> None:
        self.pooling, self.shift, self.calls = pooling, shift, 0
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(256, width, generator=generator)
        self.noise = noise * torch.randn(256, width, generator=generator)

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = [[(each + self.shift) % 256 for each in text.encode()][:64] for text in texts]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
        return tokens, mask

    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return ((self.table + self.noise)[tokens] * mask[..., None]).sum(1)

    def outputs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return (self.table + self.noise)[tokens]

    def close(self) -> None: ...


@pytest.fixture
def text(tmp_path: Path) -> str:
    words = ["red", "green", "blue", "swift", "slow", "tall", "small", "round"]
    lines = [f"The {words[n % 8]} fox number {n} saw {words[n * 3 % 8]} things again." for n in range(30)]
    (tmp_path / "text.txt").write_text("A title\n\n" + " ".join(lines) + "\n\nToo short.\n", encoding="utf-8")
    return str(tmp_path / "text.txt")


def measured(text: str, ours: MadeUp, theirs: MadeUp, **fields: Any) -> dict[str, Metric]:
    wanted = Embedding(dataset=text, sentences=SENTENCES, **fields)
    return {metric.name: metric for metric in wanted.run(ours, EvalContext(baseline=theirs))}


def test_a_model_agrees_with_itself(text: str) -> None:
    found = measured(text, MadeUp(), MadeUp(), batch=5)
    assert list(found) == list(Embedding.metrics)
    assert [metric.value for metric in found.values()] == pytest.approx([1.0] * 5)
    assert all(metric.higher_is_better and metric.value <= 1.0 for metric in found.values())
    protocol = found["cosine_similarity"].protocol
    for words in (
        "12 different sentences of 5 to 60 words",
        "padded batches of 5",
        "embeddings: mean of the tokens; cosine similarity to",
    ):
        assert words in protocol


def test_the_numbers_are_those_of_the_embeddings(text: str) -> None:
    ours, theirs = MadeUp(noise=0.3), MadeUp()
    found = measured(text, ours, theirs, batch=1)
    sentences = split_sentences([Path(text).read_text(encoding="utf-8")])
    taken = [sentences[n * len(sentences) // SENTENCES] for n in range(SENTENCES)]
    both = [torch.cat([each.embed(*each.tokenize([line])) for line in taken]).double() for each in (ours, theirs)]
    cosines = torch.cosine_similarity(*both, dim=-1)
    assert found["cosine_similarity"].value == pytest.approx(float(cosines.mean()))
    assert found["cosine_similarity_min"].value == pytest.approx(float(cosines.min()))
    assert found["cosine_similarity_p1"].value == pytest.approx(float(cosines.quantile(0.01)))
    assert found["cosine_similarity_min"].value < found["spearman_cosine"].value < 1
    assert sorted(found["cosine_similarity"].samples) == pytest.approx(sorted(cosines.tolist()))


def test_rank_correlation_and_neighbours_by_hand() -> None:
    left = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    # the example of scipy.stats.spearmanr
    assert spearman(left, torch.tensor([5.0, 6.0, 7.0, 8.0, 7.0])) == pytest.approx(0.8207826817)
    assert spearman(left, left**3) == pytest.approx(1.0)
    assert spearman(left, -left) == pytest.approx(-1.0)
    points = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), dim=-1)
    assert pairwise(points).shape == (6,)
    assert neighbour_recall(points, points, 1) == [1.0] * 4
    assert neighbour_recall(points[[0, 2, 1, 3]], points, 1) == [0.0] * 4


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (MadeUp(), None, "embedding: there is no baseline. It measures how far"),
        (
            MadeUp(shift=1),
            MadeUp(),
            "the model and the baseline read the text as different tokens. Their tokenizers differ",
        ),
        (
            MadeUp(pooling="first token"),
            MadeUp(),
            "embeddings are the first token, and the baseline's the mean of the tokens",
        ),
        (MadeUp(width=8), MadeUp(), "the model's embeddings have 8 numbers and the baseline's 16"),
        (MadeUp(noise=float("inf")), MadeUp(), "made-up: an embedding holds NaN or Inf. The weights are damaged"),
    ],
)
def test_what_cannot_be_compared(text: str, ours: MadeUp, theirs: MadeUp, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        measured(text, ours, theirs)


def test_a_text_without_enough_sentences(text: str) -> None:
    with pytest.raises(
        EvalError, match=r"the text has 30 different sentences and 99 are asked for. Counted are those of 5 to 60 words"
    ):
        Embedding(dataset=text, sentences=99).run(MadeUp(), EvalContext(baseline=MadeUp()))
    wanted = Embedding(dataset=text, sentences=12)
    calibrated = (wanted.identity(),)
    with pytest.raises(EvalError, match="the model was calibrated on"):
        wanted.run(MadeUp(), EvalContext(baseline=MadeUp(), calibrated_on=calibrated))


def test_sentences() -> None:
    documents = [
        "One two three four\nfive. Six seven! Why would nobody ask him about it? e.g. this one here is not\none.",
        "One two three four five.",
    ]
    assert split_sentences(documents) == [
        "One two three four five.",
        "Why would nobody ask him about it? e.g. this one here is not one.",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Let every call of a session take the next of some times."""

    def run(times: Sequence[float]) -> None:
        moments, left = [0.0], iter(times)

        def now() -> float:
            moments.append(moments[-1] + (next(left) if len(moments) % 2 == 0 else 0.0))
            return moments[-1]

        monkeypatch.setattr(time, "perf_counter", now)

    return run


def test_latency_by_a_clock_of_our_own(clock: Callable[[Sequence[float]], None]) -> None:
    wanted = Encoding(batch_sizes=(4,), lengths=(8,), calls=4, repeats=2)
    clock([9.0] * 5 + [2.0] * 5 + [2.0] * 5 + [1.0, 2.0, 3.0, 4.0] + [2.0, 2.0, 2.0, 2.0])
    session = MadeUp()
    found = {metric.name: metric for metric in wanted.run(session, EvalContext())}
    assert session.calls == 15 + 8
    assert found["latency_p50_s"].samples == pytest.approx((2.5, 2.0))
    assert found["latency_p95_s"].samples == pytest.approx((3.85, 2.0))
    assert found["sequences_per_s"].samples == pytest.approx((1.6, 2.0))
    assert found["latency_p50_s"].labels == {"batch": 4, "length": 8}
    assert found["peak_memory_bytes"].value > 1e6
    for words in (
        "seed 0",
        "to embeddings (mean of the tokens) in main memory",
        "1 repeats of 4 calls",
        "mean of 4 turns",
        "wall clock",
        torch.__version__.partition("+")[0],
    ):
        assert words in found["latency_p50_s"].protocol


def test_times_that_never_settle_and_turns_that_lie_apart(clock: Callable[[Sequence[float]], None]) -> None:
    wanted = Encoding(batch_sizes=(1,), lengths=(8,), calls=2, repeats=2)
    clock([float(1 + n // 5 % 2) for n in range(100)] + [1.0, 1.0] + [3.0] * 12)
    context = EvalContext()
    wanted.pool([wanted.run(MadeUp(), replace(context, turn=Turn(index, 2))) for index in (0, 1)], context)
    assert context.notes[0].startswith(
        "encoding, batch 1, length 8: after 100 warm-up calls medians still differ by more than 5%"
    )
    assert context.notes[1].startswith("encoding, batch 1, length 8: the medians of the turns are uncertain by")


def test_repeats_are_shared_among_turns(clock: Callable[[Sequence[float]], None]) -> None:
    wanted = Encoding(batch_sizes=(1,), lengths=(8,), calls=2, repeats=2)
    clock([1.0] * 12 + [1.0] * 10 + [3.0] * 2)
    turns = [wanted.run(MadeUp(), EvalContext(turn=Turn(index, 2))) for index in (0, 1)]
    pooled = {metric.name: metric for metric in wanted.pool(turns, EvalContext())}
    assert pooled["latency_p50_s"].samples == pytest.approx((1.0, 3.0))
    assert pooled["latency_p50_s"].value == pytest.approx(2.0)


def test_a_configuration_that_does_not_fit_fails_in_every_row_and_the_next_is_measured() -> None:
    class Small(MadeUp):
        def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
            if len(tokens) > 8:
                raise ResourceError("out of memory", where="made-up")
            return super().embed(tokens, mask)

    context = EvalContext()
    wanted = Encoding(batch_sizes=(16, 8), lengths=(8,), calls=2, repeats=2)
    found = wanted.run(Small(), context)
    names = {metric.name for metric in found if metric.labels["batch"] == 8}
    assert "peak_memory_bytes" in names
    failed = {metric.name: metric.failure for metric in found if metric.labels["batch"] == 16}
    assert failed == dict.fromkeys(names, "memory ran out on cpu")
    assert context.notes[0] == "encoding at batch 16, length 8: memory ran out on cpu. Lower batch_sizes or lengths."
    with pytest.raises(ResourceError, match="batch 16, length 8: memory ran out"):
        wanted.model_copy(update={"batch_sizes": (16,)}).run(Small(), context)


def test_what_is_timed_is_what_the_model_is_for() -> None:
    session = MadeUp(pooling="")
    session.embed = None  # type: ignore[method-assign, assignment]
    tokens = random_tokens(session, 2, 8, 0)
    assert tokens.shape == (2, 8)
    assert tokens.equal(random_tokens(session, 2, 8, 0))
    Timed(session, tokens)()
    assert session.calls == 1
    assert "to logits in main memory" in Encoding()._protocol(session, 0)


def test_rows_gates_and_lengths() -> None:
    wanted = Encoding(batch_sizes=(1, 8), lengths=(16, 65))
    assert wanted.row_labels() == tuple({"batch": batch, "length": length} for batch in (1, 8) for length in (16, 65))
    check_gate(parse_gate("latency_p50_s[batch=1,length=16]", "<= 0.7x"), [wanted])
    with pytest.raises(
        ValueError, match="no row of 'latency_p95_s' has length=128. There will be: length=16, length=65"
    ):
        check_gate(parse_gate("latency_p95_s[length=128]", "<= 1"), [wanted])
    with pytest.raises(ValueError, match="'spearman_cosine' compares with the baseline already"):
        check_gate(parse_gate("spearman_cosine", ">= 0.9x"), [Embedding(dataset="python-reference")])
    with pytest.raises(
        EvalError, match="encoding: sequences of 65 tokens, and the model has 64 positions. Set lengths to at most 64"
    ):
        wanted.run(MadeUp(), EvalContext())
