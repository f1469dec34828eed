import json
import math
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optkit_evals.perplexity import Perplexity
from optkit_evals.windows import slices

from optkit.errors import EvalError, RecipeError, SourceError
from optkit.measure import EvalContext
from optkit.recipe.recipe import load_recipe
from tests.support.bigram_session import BigramSession

LETTERS = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=250))


def by_hand(session: BigramSession, windows: list[list[int]]) -> list[float]:
    """The mean loss of each window, token by token in double precision."""
    losses = []
    for window in windows:
        loss = 0.0
        for seen, predicted in pairwise(window):
            row = session.table[seen].tolist()
            loss += math.log(math.fsum(map(math.exp, row))) - row[predicted]
        losses.append(loss / (len(window) - 1))
    return losses


def tokens_of(session: BigramSession, letters: str) -> list[int]:
    return [ord(letter) % session.vocabulary for letter in letters]


def test_all_windows_by_hand(text):
    session = BigramSession()
    (metric,) = Perplexity(dataset=text, window=32).run(session, EvalContext())
    ids = tokens_of(session, LETTERS)
    losses = by_hand(session, [ids[start : start + 32] for start in range(0, 224, 32)])
    assert metric.samples == pytest.approx(losses, abs=1e-6)
    assert metric.value == pytest.approx(math.exp(sum(losses) / 7), abs=1e-5)
    assert metric.pairing == "paired_log"
    error = torch.tensor(losses, dtype=torch.float64).std().item() / math.sqrt(7)
    # what a correlation of 0.4 between neighbours adds
    added = 2 * sum((1 - lag / 7) * 0.4**lag for lag in range(1, 7))
    half = 2.4469 * error * math.sqrt((1 + added) / (1 - added / 6))
    assert metric.interval == pytest.approx((metric.value * math.exp(-half), metric.value * math.exp(half)), rel=1e-4)


def test_losses_are_the_same_whatever_the_slice(text, monkeypatch):
    whole = Perplexity(dataset=text, window=64).run(BigramSession(), EvalContext())[0]
    monkeypatch.setattr("optkit_evals.windows.SLICE_BYTES", 7 * 4 * 32)
    assert [part.stop - part.start for part in slices(63, 32)] == [7] * 9
    assert Perplexity(dataset=text, window=64).run(BigramSession(), EvalContext())[0].samples == whole.samples


def test_the_protocol_states_what_must_be_equal(text):
    (metric,) = Perplexity(dataset=text, window=32, windows=3).run(BigramSession(), EvalContext())
    assert len(metric.samples) == 3
    for part in (
        "text.txt",
        "revision sha256:",
        "first 3 windows of 32 tokens",
        "tokenizer adds no BOS",
        "93 tokens counted",
        "token ids ",
    ):
        assert part in metric.protocol
    other = Perplexity(dataset=text, window=32, windows=3).run(BigramSession(vocabulary=31), EvalContext())[0]
    assert other.protocol != metric.protocol


@pytest.mark.parametrize("bos", ["none", "text", "window", "tokenizer"])
def test_bos(text, bos):
    session = BigramSession(before="!", after="?")
    (metric,) = Perplexity(dataset=text, window=32, windows=4, bos=bos).run(session, EvalContext())
    ids, start = tokens_of(session, LETTERS), tokens_of(session, "!")
    windows = {
        "none": [ids[index * 32 : index * 32 + 32] for index in range(4)],
        "text": [(start + ids)[index * 32 : index * 32 + 32] for index in range(4)],
    }.get(bos, [start + ids[index * 31 : index * 31 + 31] for index in range(4)])
    assert metric.samples == pytest.approx(by_hand(session, windows), abs=1e-6)
    assert {"none": "no BOS", "text": "BOS once"}.get(bos, "BOS in each window") in metric.protocol
    assert "124 tokens counted" in metric.protocol


def test_the_tokens_that_a_tokenizer_adds_at_the_end_are_not_measured(text):
    plain = Perplexity(dataset=text, window=50).run(BigramSession(), EvalContext())[0]
    ended = Perplexity(dataset=text, window=50).run(BigramSession(after="?"), EvalContext())[0]
    assert ended.samples == plain.samples


def test_each_window_begins_with_bos_where_the_tokenizer_puts_it_before_a_text(text):
    session = BigramSession(before="!")
    assert Perplexity(dataset=text, window=32).cut(session, EvalContext()).tokens[:, 0].unique().tolist() == tokens_of(
        session, "!"
    )
    assert (
        Perplexity(dataset=text, window=32).cut(BigramSession(), EvalContext()).protocol.count("tokenizer adds no BOS")
        == 1
    )


def test_bos_that_the_tokenizer_does_not_add(text):
    session = BigramSession()
    with pytest.raises(
        SourceError, match=r"bos is `window`, and the tokenizer has no such token. Set bos to tokenizer or none"
    ):
        Perplexity(dataset=text, window=32, bos="window").run(session, EvalContext())
    session.tokenizer = SimpleNamespace(bos_token_id=7)  # type: ignore[attr-defined]
    windows = Perplexity(dataset=text, window=32, bos="window").cut(session, EvalContext())
    assert windows.tokens[:, 0].unique().tolist() == [7]
    assert windows.tokens[:, 1:].flatten().tolist() == tokens_of(session, LETTERS)[: windows.tokens[:, 1:].numel()]
    assert "BOS in each window" in windows.protocol


@pytest.mark.parametrize(
    ("kind", "before", "warned"), [("gemma3_text", "", True), ("gemma", "!", False), ("llama", "", False)]
)
def test_a_family_that_needs_bos_and_gets_none(text, tmp_path, kind, before, warned):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    session, context = BigramSession(before=before), EvalContext()
    session.directory = tmp_path
    for eval_ in (Perplexity(dataset=text, window=32), Perplexity(dataset=text, window=16)):
        eval_.cut(session, context)
    said = (
        f"{text}: windows of a {kind} model begin without BOS, which its family needs: its "
        "numbers are worse than the model is."
    )
    said += " Set bos: window"
    assert context.notes == ([said] if warned else [])
    Perplexity(dataset=text, window=32, bos="none").cut(session, context)
    assert len(context.notes) == (kind != "llama")


def test_more_before_a_text_than_a_window_holds(text):
    with pytest.raises(SourceError, match="4 tokens before the text fill the window of 4"):
        Perplexity(dataset=text, window=4, bos="window").run(BigramSession(before="!!!!"), EvalContext())


def test_a_window_longer_than_the_model(text):
    with pytest.raises(
        EvalError, match=r"a window of 65 tokens is longer than the model's 64 positions.*Set window to 64 or less"
    ):
        Perplexity(dataset=text, window=65).run(BigramSession(), EvalContext())


def test_a_text_too_short(text):
    with pytest.raises(EvalError, match="the text has 250 tokens and 8 windows of 32 need 256"):
        Perplexity(dataset=text, window=32, windows=8).run(BigramSession(), EvalContext())
    with pytest.raises(EvalError, match="the text has 250 tokens and 2 windows of 200 need 400"):
        Perplexity(dataset=text, window=200).run(BigramSession(positions=512), EvalContext())


def test_text_that_was_calibrated_on_is_refused(text, tmp_path):
    identity = Perplexity(dataset=text).pinned(None).identity()
    with pytest.raises(EvalError, match=r"the model was calibrated on .*text\.txt \(all\)\. A number measured on"):
        Perplexity(dataset=text, window=32).run(BigramSession(), EvalContext(calibrated_on=(identity,)))
    copy = tmp_path / "copy.txt"
    copy.write_text(LETTERS)
    with pytest.raises(EvalError, match="calibrated on"):
        Perplexity(dataset=str(copy), window=32).run(BigramSession(), EvalContext(calibrated_on=(identity,)))
    other = {"dataset": "c4", "split": "train", "revision": "1234"}
    assert Perplexity(dataset=text, window=32).run(BigramSession(), EvalContext(calibrated_on=(other,)))


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite(text, damage):
    session = BigramSession()
    session.table[:, tokens_of(session, "e")[0]] = damage
    with pytest.raises(
        EvalError, match=r"bigram: the mean loss of a window is (nan|inf) nats.*the weights are damaged"
    ):
        Perplexity(dataset=text, window=32).run(session, EvalContext())


def test_one_window_is_refused_for_it_has_no_error(text):
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        Perplexity(dataset=text, windows=1)


def test_pinning_fills_the_revision_in_and_keeps_the_rest(text):
    pinned = Perplexity(dataset=text, window=32, windows=3, bos="none").pinned(None)
    assert isinstance(pinned, Perplexity)
    assert pinned.revision.startswith("sha256:")
    assert (pinned.window, pinned.windows, pinned.bos) == (32, 3, "none")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_small_real_model_on_wikitext2(smol: Path, shared_data: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from optkit.session import open_session

    wiki = (shared_data / "wikitext2_raw" / "wiki.test.raw").read_text(encoding="utf8")
    rows = ["" if not line.strip() else line + "\n" for line in wiki.split("\n")[:-1]]
    ids = AutoTokenizer.from_pretrained(smol)("\n\n".join(rows), return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    total = 0.0
    for index in range(15):
        window = ids[:, index * 2048 : (index + 1) * 2048]
        with torch.inference_mode():
            total += model(window, labels=window).loss.item()
    independent = math.exp(total / 15)
    del model

    session = open_session(smol, (), "cpu")
    (metric,) = Perplexity(dataset="wikitext2", split="test", windows=15).run(session, EvalContext(data=shared_data))
    assert metric.value == pytest.approx(20.519, abs=0.01)
    assert metric.value == pytest.approx(independent, rel=5e-5)


def test_several_texts_have_a_row_each(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(LETTERS[::-1] * 2)
    session = BigramSession()
    eval = Perplexity(dataset=text, window=32, also=[str(other)])
    found = eval.run(session, EvalContext())
    assert [metric.labels for metric in found] == [{"text": "text.txt"}, {"text": "other.txt"}]
    assert tuple(metric.labels for metric in found) == eval.row_labels()
    alone = [Perplexity(dataset=name, window=32).run(session, EvalContext())[0] for name in (text, str(other))]
    assert [metric.samples for metric in found] == [metric.samples for metric in alone]
    assert [metric.protocol for metric in found] == [metric.protocol for metric in alone]
    both = {"dataset": "wikitext2", "split": "validation"}
    assert Perplexity(dataset="wikitext2", also=[both]).row_labels() == (
        {"text": "wikitext2:test"},
        {"text": "wikitext2:validation"},
    )


def test_a_recipe_of_one_text_says_what_it_always_said(text):
    assert "also" not in Perplexity(dataset=text).model_dump(mode="json")
    several = Perplexity(dataset=text, also=["c4"])
    assert Perplexity.model_validate(several.model_dump(mode="json")) == several
    assert load_recipe({"model": "smollm2-135m", "evals": [{"perplexity": {"dataset": text, "also": ["c4"]}}]}).evals


def test_further_texts_are_pinned_and_checked_like_the_first(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(LETTERS)
    eval = {"perplexity": {"dataset": text, "also": [str(other)], "window": 32}}
    recipe = {"model": "smollm2-135m", "evals": [eval], "gates": {"perplexity[text=other.txt]": "<= 50"}}
    pinned = load_recipe(recipe).pinned(None).evals[0].value
    assert isinstance(pinned, Perplexity)
    assert pinned.also[0].revision.startswith("sha256:")
    shaped = EvalContext(calibrated_on=({"dataset": str(other), "split": "all", "revision": pinned.also[0].revision},))
    with pytest.raises(EvalError, match="flatter"):
        pinned.run(BigramSession(), shaped)
    with pytest.raises(RecipeError, match="no row of 'perplexity' has text=c4"):
        load_recipe({**recipe, "gates": {"perplexity[text=c4]": "<= 50"}})
