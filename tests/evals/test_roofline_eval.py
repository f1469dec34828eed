"""The eval `roofline`: throughput's rows, and beside them the limits of the device."""

from pathlib import Path

import pytest
from optkit_evals import roofline
from optkit_evals.roofline import LIMITS, Roofline
from optkit_evals.throughput import Throughput

from optkit.devices.roof import Rate, Roof
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.reports.roofline import Device, work_of
from optkit.reports.roofline.forms import parse_form
from optkit.reports.roofline.limits import session_limits
from optkit.session import open_session
from optkit.settings.precision import Precision
from tests.conftest import TinyModel
from tests.support.packed_models import save_packed
from tests.support.scorecards import metric

DEVICE = Device("Abacus", 1e9, {"fp32": 1e9, "bf16": 4e9}, 1e9, "counted by hand")


def rate(low: float = 0.99) -> Rate:
    return Rate(value=1.0, low=low, high=1.0, repeats=5)


@pytest.fixture
def roof(monkeypatch: pytest.MonkeyPatch) -> Roof:
    roof = Roof(reading=rate(), copying=rate(), products={"fp32": rate(0.5)})
    monkeypatch.setattr(roofline, "measured_device", lambda _device, progress: (DEVICE, roof))
    return roof


def test_shares_of_another_roof_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for generation in (0, 1):
        monkeypatch.setattr(roofline, "roof_generation", lambda _device, found=generation: found)
        keys.append(Roofline(prompts=(8,)).circumstances("cpu"))
    assert keys == [{"roof": 0}, {"roof": 1}]


def test_every_number_stands_beside_its_limit(tiny_model: TinyModel, roof: Roof) -> None:
    session, context = open_session(tiny_model("llama")), EvalContext()
    timed = Roofline(batch_sizes=(1, 3), prompts=(8,), new_tokens=4, repeats=2, limit_s=1)
    found = timed.run(session, context)
    pooled = {
        (metric.name, metric.labels["batch"]): metric
        for metric in timed.pool([found, timed.run(session, context)], context)
    }
    limit, share, decode = (pooled[f"decode_{name}", 1] for name in ("limit_tokens_per_s", "of_limit", "tokens_per_s"))
    assert (limit.interval, limit.samples, len(share.samples)) == (None, (), 2)
    assert share.interval == pytest.approx([min(1.0, edge / limit.value) for edge in decode.interval])
    assert {metric.name for metric in found} <= set(Roofline.metrics)
    assert {str(metric.labels) for metric in found} == set(map(str, timed.row_labels()))
    work, form = work_of(Checkpoint(tiny_model("llama")).shape), parse_form("stored", "fp32")
    for batch in (1, 3):
        rows = {metric.name: metric for metric in found if metric.labels["batch"] == batch}
        assert set(LIMITS) <= set(rows)
        assert "Abacus moves 1.000 GB/s; GFLOP/s: fp32 1, bf16 4 (counted by hand)" in rows["decode_of_limit"].protocol
        flops = sum(work.matrix_flops(form, 8 * batch, batch).values())
        attention = work.attention_flops(batch, 8, 0)
        step = sum(work.matrix_flops(form, batch, batch).values()) + work.attention_flops(batch, 1, 10)
        prefill, decode = rows["prefill_tokens_per_s"], rows["decode_tokens_per_s"]
        assert rows["prefill_mfu"].value == pytest.approx((flops + attention) * prefill.value / (8 * batch) / 1e9)
        assert rows["prefill_matrix_mfu"].value == pytest.approx(flops * prefill.value / (8 * batch) / 1e9)
        assert rows["decode_mfu"].value == pytest.approx(step * decode.value / batch / 1e9)
        assert rows["decode_bandwidth_used"].value == pytest.approx(rows["decode_bytes_per_s"].value / 1e9)
        limit = rows["decode_limit_tokens_per_s"]
        assert limit.value == pytest.approx(batch / max(session.decode_bytes(batch, 10) / 1e9, step / 1e9))
        assert (limit.samples, limit.interval, limit.pairing) == ((), None, "exact")
        share = rows["decode_of_limit"]
        assert share.value == pytest.approx(decode.value / limit.value)
        assert share.samples == pytest.approx([sample / limit.value for sample in decode.samples])
    assert "roofline: Abacus moves 1.000 GB/s; GFLOP/s: fp32 1, bf16 4 (counted by hand)" in context.notes
    assert any(
        note.startswith("roofline, batch 1, prompt 8, 4 new tokens: prefill is bound by compute, decode by weights")
        for note in context.notes
    )
    assert (
        "roofline: Abacus was not quiet when it was measured "
        "(fp32 by 50%): optkit roofline MODEL --remeasure" in context.notes
    )
    assert len({metric.protocol for metric in found}) == 2


def test_a_row_that_failed_has_no_share(tiny_model: TinyModel, roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"batch": 1, "prompt": 8, "new_tokens": 4}
    rows = [
        metric(name, 0, "tokens/s", "p", higher_is_better=True, labels=labels, failure="memory ran out")
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s")
    ]
    monkeypatch.setattr(Throughput, "run", lambda self, session, context: list(rows))
    found = Roofline(prompts=(8,), new_tokens=4).run(open_session(tiny_model("llama")), EvalContext())
    for each in found[2:]:
        assert bool(each.failure) != each.name.endswith("limit_tokens_per_s")
        assert each.samples == ()


def test_packed_weights_are_read_as_they_are_held(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    limits = []
    for directory in (tmp_path / "packed", tmp_path / "plain"):
        session = open_session(directory)
        limits.append(session_limits(session, work_of(Checkpoint(directory).shape), DEVICE, 1, 8, 10)[1])
        assert limits[-1].weight_bytes + limits[-1].cache_bytes == session.decode_bytes(1, 10)
    packed, plain = limits
    assert packed.weight_bytes < 0.6 * plain.weight_bytes
    assert packed.matrix_flops == plain.matrix_flops


@pytest.mark.parametrize(("mode", "name"), [("fp32", "fp32"), ("bf16", "bf16"), ("autocast", "bf16")])
def test_products_are_counted_at_the_rate_of_what_they_are_computed_in(
    tiny_model: TinyModel, mode: str, name: str
) -> None:
    session = open_session(tiny_model("llama"), [Precision(mode=mode)])
    work = work_of(Checkpoint(tiny_model("llama")).shape)
    limit = session_limits(session, work, DEVICE, 1, 8, 10)[0]
    assert limit.compute_s == pytest.approx((limit.matrix_flops + limit.attention_flops) / DEVICE.rates[name])


def test_tf32_is_found_where_it_is_allowed(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(tiny_model("llama"))
    assert session.product_dtype == "float32"
    monkeypatch.setattr(session, "device", "cuda:0")
    assert session.product_dtype == "float32"
    monkeypatch.setattr(session, "_computing", lambda: Precision(mode="tf32").computing("cuda"))
    assert session.product_dtype == "tf32"


def test_the_baseline_is_timed_in_turns_as_throughput_is() -> None:
    assert Roofline.timed
    assert set(Throughput.metrics) < set(Roofline.metrics)
    assert Roofline(batch_sizes=(2,), prompts=(8,), new_tokens=4).row_labels() == (
        {"batch": 2, "prompt": 8, "new_tokens": 4},
    )
