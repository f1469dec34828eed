"""Which one to take if one thing alone counts."""

from optkit.comparison.table import bests_text
from tests.support.candidates import GOOD, compared, made


def test_those_that_are_not_measurably_worse_than_the_best_of_an_axis_are_tied() -> None:
    found = compared(GOOD, *(made(f"tie{index}", 0.2, 2.3 + index / 1e5, 150e6) for index in range(3)))
    (group,) = found.groups
    assert group.bests["size_bytes"] == ("tie0", "tie1", "tie2")
    assert group.bests["decode_tokens_per_s[batch=1]"] == ("tie2", "tie1", "tie0")
    assert bests_text(found, group) == (
        "perplexity good; size_bytes tie0, tie1, tie2 tied; decode_tokens_per_s tie2, tie1, tie0 tied"
    )
    four = compared(*(made(f"tie{index}", 0.2, 2.3 + index / 1e5, 150e6) for index in range(4)))
    told = bests_text(four, four.groups[0]).split("; ")
    assert told[1:] == ["size_bytes 4 tied, lowest tie0", "decode_tokens_per_s 4 tied, highest tie3"]
    failing = compared(made("failing", 0.2, gates={"perplexity": "<= 1.01x"}))
    assert failing.groups[0].bests == {}
