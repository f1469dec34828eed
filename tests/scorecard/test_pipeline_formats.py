"""Gates and numbers as pipelines read them: JUnit's XML and OpenMetrics."""

import xml.etree.ElementTree as ElementTree

import pytest
from junitparser import JUnitXml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from optkit.measure import Metric
from optkit.scorecard import Loading, Scorecard, build_scorecard
from optkit.scorecard.gate_lines import gate_lines
from optkit.scorecard.junit import to_junit, xml_text
from optkit.scorecard.openmetrics import to_openmetrics


def number(name, value, interval=None, unit="tokens/s", **labels):
    fields = {"labels": labels, "interval": interval, "higher_is_better": True}
    return Metric(name=name, value=value, unit=unit, protocol="by the clock", pairing="independent", **fields)


def card(gates=None, **more) -> Scorecard:
    metrics = (
        number("decode_tokens_per_s", 100.0, (90.0, 110.0), batch=1),
        number("decode_tokens_per_s", 300.0, (290.0, 310.0), batch=8),
        number("size_bytes", 120e6, unit="bytes"),
        number("lost", 0.0).model_copy(update={"failure": "memory ran out"}),
    )
    baseline = (number("decode_tokens_per_s", 50.0, (45.0, 55.0), batch=1), number("size_bytes", 480e6, unit="bytes"))
    limits = {
        "decode_tokens_per_s[batch=1]": ">= 2x",
        "decode_tokens_per_s": ">= 200",
        "size_bytes": "<= 0.25x",
        "lost": ">= 1",
    }
    fields = {"name": "small", "artifact_key": "ab" * 32, "recipe": {}, "metrics": metrics, "baseline": baseline}
    return build_scorecard(**{**fields, "gates": limits if gates is None else gates, **more})


GATES = [
    ("decode_tokens_per_s[batch=1]", ">= 2x", "INCONCLUSIVE", "2.000x [1.732, 2.309] of baseline"),
    ("decode_tokens_per_s[batch=1]", ">= 200", "FAIL", "100.0 tok/s [90.00 tok/s, 110.0 tok/s]"),
    ("decode_tokens_per_s[batch=8]", ">= 200", "PASS", "300.0 tok/s [290.0 tok/s, 310.0 tok/s]"),
    ("size_bytes", "<= 0.25x", "PASS", "0.2500x of baseline"),
    ("lost", ">= 1", "FAIL", "memory ran out"),
]


def test_each_gate_with_each_number():
    found = [(line.row, line.limit, str(line.verdict), line.said) for line in gate_lines(card())]
    assert [each[:3] for each in found] == [each[:3] for each in GATES]
    assert [each[3] for each in found[1:]] == [each[3] for each in GATES[1:]]
    assert found[0][3].startswith("2.000x [1.7")


def read(content: bytes) -> JUnitXml:
    return JUnitXml.fromstring(content)


def test_junit_has_a_test_for_each_gate():
    (suite,) = read(to_junit(card()))
    assert (suite.name, suite.tests, suite.failures, suite.errors, suite.skipped) == ("small", 5, 3, 0, 0)
    cases = {case.name: (case.classname, [(each.type, each.message) for each in case.result]) for case in suite}
    assert cases["size_bytes <= 0.25x"] == ("small.size_bytes", [])
    assert cases["decode_tokens_per_s[batch=8] >= 200"] == ("small.decode_tokens_per_s", [])
    assert cases["decode_tokens_per_s[batch=1] >= 200"][1] == [
        ("FAIL", "FAIL: 100.0 tok/s [90.00 tok/s, 110.0 tok/s]; the limit is >= 200")
    ]
    ((kind, message),) = cases["decode_tokens_per_s[batch=1] >= 2x"][1]
    assert kind == "INCONCLUSIVE"
    assert message.endswith("of baseline; the limit is >= 2x")
    assert cases["lost >= 1"][1] == [("FAIL", "FAIL: memory ran out; the limit is >= 1")]


def test_junit_is_what_jenkins_reads():
    """Its schema (junit-10.xsd of the xUnit plugin) has these elements and attributes and no others."""
    document = ElementTree.fromstring(to_junit(card({"size_bytes": "<= 1x of previous", "lost": ">= 1"})))
    known = {
        "testsuites": {"name", "time", "tests", "failures", "errors"},
        "testsuite": {"name", "tests", "failures", "errors", "time", "skipped", "timestamp"},
        "testcase": {"name", "time", "classname"},
        "failure": {"type", "message"},
        "skipped": {"type", "message"},
    }
    assert document.tag == "testsuites"
    assert {each.tag for each in document.iter()} == set(known)
    assert all(set(each.attrib) <= known[each.tag] for each in document.iter())


def test_skipped_gates_and_engines():
    engines = (
        Loading(engine="vllm", verdict="refused", reason="no such kernel"),
        Loading(engine="optimum", verdict="skipped", reason="not installed"),
        Loading(engine="transformers", verdict="agrees"),
    )
    scorecard = card({"size_bytes": "<= 1x of previous"}).model_copy(update={"loading": engines})
    (suite,) = read(to_junit(scorecard))
    assert [(case.name, [type(each).__name__ for each in case.result]) for case in suite] == [
        ("size_bytes <= 1x of previous", ["Skipped"]),
        ("vllm opens the artifact", ["Failure"]),
        ("optimum opens the artifact", ["Skipped"]),
        ("transformers opens the artifact", []),
    ]
    assert suite.failures == 1


def test_junit_without_gates_is_empty():
    (suite,) = read(to_junit(card({})))
    assert suite.tests == 0


@pytest.mark.parametrize("text", ["\x1b[31m", "\x00", "\ufffe", "\ud800", "<&\"'>]]>", "é\U0001f600\n"])
def test_xml_holds_any_text(text):
    metric = number("size_bytes", 1.0, unit="bytes", file=text)
    content = to_junit(card({"size_bytes": "<= 0"}, metrics=(metric,), name=f"n{text}"))
    (suite,) = read(content)
    assert suite.name == f"n{xml_text(text)}"
    assert xml_text("\x1b\ud800") == "\\x1b\\ud800"


def samples(scorecard: Scorecard) -> dict[str, dict[str, float]]:
    """Return name -> labels but for recipe and protocol, as text -> value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(to_openmetrics(scorecard)):
        assert family.type == "gauge"
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("recipe", "protocol")}
            found.setdefault(sample.name, {})[",".join(labels.values())] = sample.value
            assert sample.labels["recipe"] == scorecard.name
    return found


def test_openmetrics_has_numbers_ratios_and_gates():
    found = samples(card())
    assert found["optkit_decode_tokens_per_s"] == {"1,artifact": 100.0, "1,baseline": 50.0, "8,artifact": 300.0}
    assert found["optkit_decode_tokens_per_s_low"] == {"1,artifact": 90.0, "1,baseline": 45.0, "8,artifact": 290.0}
    assert found["optkit_size_bytes_ratio"] == {"baseline": 0.25}
    assert "optkit_size_bytes_low" not in found
    assert "optkit_lost" not in found
    assert found["optkit_gate_exit_status"] == {
        "decode_tokens_per_s[batch=1] >= 2x": 4.0,
        "decode_tokens_per_s[batch=1] >= 200": 3.0,
        "decode_tokens_per_s[batch=8] >= 200": 0.0,
        "size_bytes <= 0.25x": 0.0,
        "lost >= 1": 3.0,
    }
    assert to_openmetrics(card()).endswith("# EOF\n")


def test_another_protocol_is_another_series():
    def protocol(scorecard):
        (family, *_) = text_string_to_metric_families(to_openmetrics(scorecard))
        return family.samples[0].labels["protocol"]

    other = number("size_bytes", 1.0, unit="bytes").model_copy(update={"protocol": "another"})
    assert protocol(card()) != protocol(card(metrics=(other,), gates={}))


def test_the_earlier_release_and_names_of_plug_ins():
    before = card({}, metrics=(number("size_bytes", 60e6, unit="bytes"),))
    assert samples(card(previous=before))["optkit_size_bytes"]["previous"] == 60e6
    odd = number("my-metric.p50", 1.0, **{"a b": 'x"\\\n', "9": "y"})
    found = samples(card({}, metrics=(odd,), baseline=()))
    assert found["optkit_my_metric_p50"] == {'y,x"\\\n,artifact': 1.0}
