import re
from typing import ClassVar

import pytest

from optkit.common.statistics import Estimate
from optkit.measure import Eval, Metric
from optkit.model.shape import ModelShape, TensorInfo
from optkit.recipe.gates import Verdict, check_gate, foreseen_failure, overall, parse_gate


class Alone(Eval):
    metrics: ClassVar[dict[str, str]] = {"perplexity": "perplexity", "size_bytes": "bytes"}


class Beside(Eval):
    compares: ClassVar[bool] = True
    metrics: ClassVar[dict[str, str]] = {"kl_divergence": "nats/token"}


def metric(name="perplexity", **labels):
    return Metric(name=name, labels=labels, value=1.0, unit="", higher_is_better=False, protocol="p")


@pytest.mark.parametrize(
    ("text", "sign", "limit", "of"),
    [
        ("<= 1.10x", "<=", 1.1, "baseline"),
        ("<= 1.10x of baseline", "<=", 1.1, "baseline"),
        (">=1.2X", ">=", 1.2, "baseline"),
        ("< 25", "<", 25.0, ""),
        (" > 3e8 ", ">", 3e8, ""),
        ("<= .5×", "<=", 0.5, "baseline"),
        ("<= 1.01x of previous", "<=", 1.01, "previous"),
        ("<= 1x  previous ", "<=", 1.0, "previous"),
        (">= 2x same engine", ">=", 2.0, "same engine"),
        (">= 2x of same  engine", ">=", 2.0, "same engine"),
    ],
)
def test_limits(text, sign, limit, of):
    gate = parse_gate("perplexity", text)
    assert (gate.operator, gate.limit, gate.of) == (sign, limit, of)
    assert parse_gate(gate.key, gate.text) == gate


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [("<= 1 GB", 10**9, "<= 1 GB"), ("<1.5GiB", 1.5 * 2**30, "< 1.5 GiB"), ("<= 3e8 B", 3e8, "<= 300000000 B")],
)
def test_a_limit_to_bytes_may_be_a_size(text, limit, shown):
    gate = parse_gate("size_bytes", text)
    assert (gate.limit, gate.of, gate.text) == (limit, "", shown)
    assert parse_gate("size_bytes", shown) == gate
    assert gate.judge(Estimate(limit)) is (Verdict.FAIL if gate.operator == "<" else Verdict.PASS)


def test_a_size_that_is_none():
    with pytest.raises(ValueError, match="'<= 1 GB' is a size, and 'perplexity' has none. Write a number without GB"):
        parse_gate("perplexity", "<= 1 GB")
    with pytest.raises(ValueError, match=r"'1lb' is no size\. Write 20 GiB"):
        parse_gate("size_bytes", "<= 1 lb")
    with pytest.raises(ValueError, match="is no limit"):
        parse_gate("size_bytes", "<= 1 GBx")


def test_labels_pick_rows_and_a_bare_name_takes_all():
    gate = parse_gate("decode_tokens_per_s[batch=1, prompt=128]", ">= 1.2x")
    assert gate.labels == {"batch": 1, "prompt": 128}
    assert gate.key == "decode_tokens_per_s[batch=1,prompt=128]"
    assert gate.matches(metric("decode_tokens_per_s", batch=1, prompt=128, new_tokens=64))
    assert not gate.matches(metric("decode_tokens_per_s", batch=8, prompt=128, new_tokens=64))
    assert not gate.matches(metric("prefill_tokens_per_s", batch=1, prompt=128))
    assert parse_gate("decode_tokens_per_s", "> 1").matches(metric("decode_tokens_per_s", batch=8))


@pytest.mark.parametrize("text", ["1.10x", "= 3", "<= ", "<= 10%", "at most 3", "<= nan", "== 1", "<= \uff11\uff12"])
def test_what_is_no_limit(text):
    with pytest.raises(ValueError, match=r"is no limit\. Write <=, >=, < or > and a number"):
        parse_gate("perplexity", text)


def test_nothing_to_be_relative_to():
    with pytest.raises(ValueError, match=r"'of previos' in '<= 1x of previos' is nothing .*Did you mean 'previous'\?"):
        parse_gate("perplexity", "<= 1x of previos")
    with pytest.raises(ValueError, match="is no limit"):
        parse_gate("perplexity", "<= 25 of previous")


def test_what_is_no_key():
    with pytest.raises(ValueError, match="'3 things' names no metric"):
        parse_gate("3 things", "<= 1")
    with pytest.raises(ValueError, match=r"'batch' in 'decode\[batch\]' is no label"):
        parse_gate("decode[batch]", "<= 1")
    with pytest.raises(ValueError, match="is no label"):
        parse_gate("decode[]", "<= 1")


@pytest.mark.parametrize(
    ("limit", "value", "interval", "verdict"),
    [
        ("<= 25", 24.0, None, Verdict.PASS),
        ("<= 25", 25.0, None, Verdict.PASS),
        ("< 25", 25.0, None, Verdict.FAIL),
        ("<= 25", 24.0, (23.0, 24.9), Verdict.PASS),
        ("<= 25", 24.0, (23.0, 25.1), Verdict.INCONCLUSIVE),
        ("<= 25", 25.5, (24.9, 26.1), Verdict.INCONCLUSIVE),
        ("<= 25", 26.0, (25.5, 26.5), Verdict.FAIL),
        (">= 1.2x", 1.3, (1.25, 1.35), Verdict.PASS),
        (">= 1.2x", 1.3, (1.15, 1.45), Verdict.INCONCLUSIVE),
        ("> 1.2x", 1.0, (0.9, 1.1), Verdict.FAIL),
    ],
)
def test_verdicts(limit, value, interval, verdict):
    assert parse_gate("perplexity", limit).judge(Estimate(value, interval)) is verdict


def test_a_gate_is_checked_against_the_evals_before_anything_runs():
    evals = [Alone(), Beside]
    check_gate(parse_gate("perplexity", "<= 1.1x"), evals)
    check_gate(parse_gate("kl_divergence", "<= 0.1"), evals)
    with pytest.raises(ValueError, match=r"no eval of the recipe measures 'perplexty'\. Did you mean 'perplexity'\?"):
        check_gate(parse_gate("perplexty", "<= 1.1x"), evals)
    with pytest.raises(ValueError, match=r"Known: kl_divergence, perplexity, size_bytes\."):
        check_gate(parse_gate("zzz", "<= 1"), evals)
    with pytest.raises(ValueError, match=r"'kl_divergence' compares with the baseline already.*\"<= 1\.1\""):
        check_gate(parse_gate("kl_divergence", "<= 1.1x"), evals)
    with pytest.raises(ValueError, match="the recipe has no evals"):
        check_gate(parse_gate("perplexity", "<= 1.1x"), [])


class Clock(Eval):
    metrics: ClassVar[dict[str, str]] = {"decode_tokens_per_s": "tokens/s"}

    def told_apart(self):
        return True


def test_engines_decide_timings_of_decoding_alone():
    check_gate(parse_gate("decode_tokens_per_s", ">= 2x same engine"), [Clock(), Alone()])
    check_gate(parse_gate("size_bytes", "<= 2x same engine"), [Alone])
    with pytest.raises(ValueError, match=r"'size_bytes' is no timing of decoding, which engines decide.*\"<= 0\.5x\""):
        check_gate(parse_gate("size_bytes", "<= 0.5x same engine"), [Clock(), Alone()])


class Shares(Eval):
    metrics: ClassVar[dict[str, str]] = {"top1_agreement": "fraction", "decode_s": "s", "odd": "furlongs"}


@pytest.mark.parametrize(
    ("key", "limit", "why"),
    [
        ("size_bytes", "<= -5", "is a number of bytes, which is above 0, so that nothing can pass <= -5"),
        ("size_bytes", ">= 0", "nothing can break >= 0"),
        ("size_bytes", "<= 0x", "is a ratio, which is above 0, so that nothing can pass <= 0x"),
        ("size_bytes", "> -1x", "nothing can break > -1x"),
        ("perplexity", "< 1", "is at least 1, so that nothing can pass < 1"),
        ("perplexity", ">= 1", "nothing can break >= 1"),
        (
            "top1_agreement",
            ">= 99",
            r'is a share between 0 and 1, so that nothing can pass >= 99. Write ">= 0.99" for 99%.',
        ),
        ("top1_agreement", "<= 1", "nothing can break <= 1"),
        ("top1_agreement", "> 1", "nothing can pass > 1"),
        ("decode_s", "<= 0", "nothing can pass <= 0"),
        ("kl_divergence", "< 0", "nothing can pass < 0"),
        ("odd", "<= 0x", "nothing can pass <= 0x"),
    ],
)
def test_a_gate_that_nothing_can_pass_or_break_is_refused(key, limit, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        check_gate(parse_gate(key, limit), [Alone(), Beside(), Shares()])


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("top1_agreement", ">= 1"),
        ("top1_agreement", "<= 0"),
        ("kl_divergence", "<= 0"),
        ("perplexity", "<= 1"),
        ("odd", "<= -3"),
    ],
)
def test_a_limit_at_the_end_of_what_can_be_is_one(key, limit):
    check_gate(parse_gate(key, limit), [Alone(), Beside(), Shares()])


def test_a_limit_beyond_all_numbers():
    with pytest.raises(ValueError, match=r"'<= 1e999' is no limit: 1e999 is beyond all numbers\."):
        parse_gate("perplexity", "<= 1e999")


def test_the_worst_verdict_counts():
    assert overall([]) is Verdict.PASS
    assert overall([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert overall([Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.PASS]) is Verdict.FAIL


def test_digits_of_other_scripts_are_no_numbers():
    assert parse_gate("decode[engine=\u0661]", "> 1").labels == {"engine": "\u0661"}


class Sizes(Eval):
    metrics: ClassVar[dict[str, str]] = {"size_bytes": "bytes", "energy_per_token_j": "J", "bits": "bits"}

    def foresee(self, shape):
        return {"size_bytes": shape.size_bytes, "bits": 0.0}

    def unmeasured(self, device):
        return {"energy_per_token_j": "it is silent"} if device == "cpu" else {}


@pytest.mark.parametrize(
    ("key", "limit", "device", "why"),
    [
        ("size_bytes", "<= 0.5x", "cpu", "gate size_bytes <= 0.5x cannot pass: the stages leave about 0.69x"),
        ("size_bytes", "<= 0.69x", "cpu", ""),
        ("size_bytes", "<= 0.8x", "cpu", ""),
        ("size_bytes", "<= 1e6", "cpu", "gate size_bytes <= 1000000 cannot pass: the stages leave about 2.76 MB"),
        ("bits", "<= 1x", "cpu", "gate bits <= 1x cannot pass: the unmodified model has none of it"),
        ("bits", ">= 4", "cpu", ""),
        ("energy_per_token_j", "< 1", "cpu", "gate energy_per_token_j < 1 cannot pass: it "
                                             "is not measured on cpu, because it is silent"),
        ("energy_per_token_j", "<= 1", "cuda", ""),
    ],
)  # fmt: skip
def test_what_is_known_to_fail_is_told_before_anything_runs(key, limit, device, why):
    artifact, baseline = (ModelShape({}, {"weight": TensorInfo("F32", (rows, 1000))}) for rows in (690, 1000))
    assert foreseen_failure(parse_gate(key, limit), [Sizes()], device, artifact, baseline) == why
