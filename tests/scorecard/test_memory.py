"""What steps and measurements needed of memory, as a scorecard keeps it."""

from optkit.devices.memory_watch import MemoryTrace
from optkit.scorecard import build_scorecard


def test_what_steps_and_measurements_needed_is_thinned_together() -> None:
    def trace(name: str, of: str = "") -> MemoryTrace:
        return MemoryTrace(name=name, of=of, seconds=tuple(range(40)), resident_bytes=tuple(range(40)))

    steps = [
        {"kind": "old", "key": "a", "cached": True, "seconds": 1.0},
        {"kind": "rtn", "key": "b", "cached": True, "seconds": 1.0, "memory": trace("rtn").model_dump()},
    ]
    measured = [trace(f"open {index}", "artifact") for index in range(19)]
    card = build_scorecard(name="m", artifact_key="c", recipe={}, metrics=[], steps=steps, memory=measured)
    assert [step.memory and step.memory.name for step in card.steps] == [None, "rtn"]
    assert [(trace.name, trace.of) for trace in card.memory] == [(trace.name, trace.of) for trace in measured]
    assert 150 < sum(len(trace.seconds) for trace in (card.steps[1].memory, *card.memory)) <= 300
    assert all(trace.resident_bytes[-1] == 39 for trace in card.memory)
