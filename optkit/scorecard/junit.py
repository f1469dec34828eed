"""Gates as tests in JUnit's XML, which GitLab, Jenkins and GitHub's reporters read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optkit.recipe.gates import Verdict
from optkit.scorecard.gate_lines import GateLine, gate_lines
from optkit.scorecard.loading import Loading
from optkit.scorecard.scorecard import Scorecard

if TYPE_CHECKING:
    from junitparser import TestCase

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(scorecard: Scorecard) -> bytes:
    """Return the XML: a test for each gate and number, and for each engine that `verify` asked.

    What ends a run with another status than 0 is a failure: its type is FAIL or INCONCLUSIVE, or
    what the engine did. A gate that was skipped is a skipped test.
    """
    from junitparser import JUnitXml, TestSuite

    suite = TestSuite(xml_text(scorecard.name))
    suite.timestamp = scorecard.created.removesuffix("+00:00")
    suite.add_testcases([_of_gate(scorecard.name, line) for line in gate_lines(scorecard)])
    suite.add_testcases([_of_engine(scorecard.name, each) for each in scorecard.loading])
    document = JUnitXml("optkit")
    document.append(suite)
    # not update_statistics: Jenkins' schema knows no `skipped` of a document
    document.tests, document.failures, document.errors = suite.tests, suite.failures, suite.errors
    written: bytes = document.tostring()
    return written


def _of_gate(recipe: str, line: GateLine) -> TestCase:
    from junitparser import Failure, Skipped, TestCase

    case = TestCase(xml_text(f"{line.row} {line.limit}"), xml_text(f"{recipe}.{line.key}"))
    if line.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        result = Failure(xml_text(f"{line.verdict}: {line.said}; the limit is {line.limit}"), line.verdict.value)
        result.text = xml_text(f"{line.row}: {line.said}\nlimit: {line.limit}\nprotocol: {line.protocol}")
        case.result = [result]
    elif line.verdict is Verdict.SKIPPED:
        case.result = [Skipped(xml_text(line.said))]
    return case


def _of_engine(recipe: str, loading: Loading) -> TestCase:
    from junitparser import Failure, Skipped, TestCase

    case = TestCase(xml_text(f"{loading.engine} opens the artifact"), xml_text(f"{recipe}.verify"))
    if loading.failed:
        case.result = [Failure(xml_text(f"{loading.verdict}: {loading.reason}"), loading.verdict)]
    elif not loading.loads:
        case.result = [Skipped(xml_text(loading.reason))]
    return case


def xml_text(text: str) -> str:
    """Return a text with the characters escaped that XML cannot hold: ESC is `\\x1b`."""
    return _NOT_XML.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
