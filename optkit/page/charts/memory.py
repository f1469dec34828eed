"""Memory over time: while the artifact was made, and while both models were opened and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from optkit.common.byte_sizes import size_text
from optkit.devices.memory_watch import MemoryTrace
from optkit.page.charts.chart import MODELS, Chart, Colour, Key, Mark, paint
from optkit.scorecard import Scorecard

READ = "Resident memory of the run and of the processes that it started"
ON_GPU = " On the GPU it is what torch allocated in the run's own process; that of other processes is not counted."
COLOURS: dict[str, Colour] = {"": "grey", **dict(MODELS)}
LETTER = 0.028
"""About the share of a chart's width that a letter takes on a phone; a phase that has no room for its name has none."""


def memory(scorecard: Scorecard) -> list[Chart]:
    """Return a chart of the steps and one of the measurements; none of what was not read."""
    steps = scorecard.steps
    made = [(step.memory, f"{step.kind}, from the store" if step.cached else step.kind) for step in steps]
    caption = f"{READ}." + (" A step from the store was read when it was made." if any(x.cached for x in steps) else "")
    if without := [step.kind for step in steps if not step.memory]:
        caption += f" Not read: {', '.join(without)}, made by an earlier optkit."
    on_gpu = "" if scorecard.environment.get("device", "cpu") == "cpu" else ON_GPU
    measured = [(trace, f"{trace.of}: {trace.name}") for trace in scorecard.memory]
    timed = f"{READ}; of what is timed, the process that is timed alone, in the first of its turns."
    return [
        *_chart(
            "memory-made", "Memory while it was made", [(each, name) for each, name in made if each], caption + on_gpu
        ),
        *_chart("memory-measured", "Memory while it was measured", measured, timed + on_gpu),
    ]


def _chart(name: str, title: str, phases: Sequence[tuple[MemoryTrace, str]], caption: str) -> Iterator[Chart]:
    """Yield the chart of phases that follow each other, if there are any."""
    bands, points = list[dict[str, Any]](), list[dict[str, Any]]()
    end = 0.0
    for trace, words in phases:
        begin, end = end, end + trace.seconds[-1]
        allocated = trace.allocated_bytes or (None,) * len(trace.seconds)
        hint = f"{words}\n{trace.seconds[-1]:.1f} s, at most {_sizes(trace)}"
        points += [
            {"time": begin + at, "resident": here, "allocated": gpu, "phase": len(bands), "hint": hint}
            for at, here, gpu in zip(trace.seconds, trace.resident_bytes, allocated, strict=True)
        ]
        bands.append({"begin": begin, "end": end, "name": trace.name, "of": trace.of})
    wide = [band for band in bands if band["end"] - band["begin"] > LETTER * (len(band["name"]) + 1) * end]
    on_gpu = [point for point in points if point["allocated"] is not None]
    line = {"x": "time", "z": "phase", "strokeWidth": 1.8}
    marks = [
        *(
            Mark(
                "rect",
                [band for band in bands if band["of"] == of],
                {"x1": "begin", "x2": "end", "fill": paint(colour), "fillOpacity": 0.14, "inset": 0.5},
            )
            for of, colour in COLOURS.items()
        ),
        Mark("lineY", points, {**line, "y": "resident", "stroke": paint("ink")}),
        Mark("lineY", on_gpu, {**line, "y": "allocated", "stroke": paint("purple")}),
        Mark("text", wide, {"x": "begin", "text": "name", "frameAnchor": "top", "textAnchor": "start", "dx": 4}),
        Mark("dot", points, {"x": "time", "y": "resident", "r": 1.5, "fill": paint("ink"), "title": "hint"}),
    ]
    if bands:
        yield Chart(
            name,
            title,
            marks,
            {"label": "seconds", "tickFormat": "~g"},
            {"label": "memory", "grid": True, "suffix": "B", "zero": True, "insetTop": 16},
            keys=[
                Key("resident memory", "ink", "line"),
                *([Key("allocated on the GPU", "purple", "line")] if on_gpu else []),
                *(Key(of, colour, "band") for of, colour in MODELS if any(band["of"] == of for band in bands)),
            ],
            caption=caption,
            height=260,
        )


def _sizes(trace: MemoryTrace) -> str:
    """Return the peak in words, of the GPU too."""
    text = size_text(max(trace.resident_bytes))
    return f"{text}; on the GPU {size_text(max(trace.allocated_bytes))}" if trace.allocated_bytes else text
