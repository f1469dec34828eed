"""The figures of the benchmarks: which chart shows which results, and captions that are data too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optkit_cli.scorecard_view import short_scorecard

from docs.benchmarks.drawing import digest, terminal
from docs.benchmarks.tables import HERE, RESULTS, Interval, Result, Row, conditions, read_results, wrapped
from optkit.comparison import Comparison, compare
from optkit.measure import Metric
from optkit.page.charts.chart import Chart, Colour, Key, Mark, paint
from optkit.page.charts.tradeoffs import tradeoffs
from optkit.page.charts.waterfalls import damage, speed
from optkit.scorecard import Rung, Scorecard, read_json

PICTURES = HERE / "figures"
SWEEP = RESULTS / "sweep_int4_cpu"
CARD = SWEEP / "gptq-bits4-group_size32.json"
LAYERS, HEAD = 6_979_321_856, 525_336_576
"""Weights of Llama-3-8B's shape: of the linear layers in its blocks, and of lm_head."""
BYTES = {"bfloat16": 2, "INT4": 0.5 + 4 / 128}
"""Of a weight in those layers, with 4 bytes for each group of 128; lm_head has 2. Both are multiplied in bfloat16."""
FAMILIES: tuple[tuple[range, str, Colour, float, str], ...] = (
    (range(3, 4), "3 bits", "vermillion", 3.3, "end"),
    (range(4, 6), "4 bits", "blue", 5.35, "start"),
    (range(8, 9), "8 bits", "green", 7.75, "end"),
)
"""Whole bits, words and colour of methods; at how many bits their labels stand, and by which end."""
LABEL = 15
"""Pixels from one label to the next."""
ENGINES: tuple[tuple[str, str, Colour], ...] = (
    ("optkit", "bfloat16", "blue"),
    ("optkit", "INT4", "green"),
    ("optkit", "FP8", "purple"),
    ("vLLM 0.22.0", "bfloat16", "vermillion"),
    ("vLLM 0.22.0", "INT4", "orange"),
    ("vLLM 0.22.0", "FP8", "sky"),
)
"""What is drawn of beside_vllm: name, weights and colour."""


@dataclass(frozen=True)
class Figure:
    """A picture with its caption."""

    title: str
    caption: str
    picture: Chart | str
    """A chart that a browser draws, or the picture itself."""

    @property
    def mark(self) -> str:
        """What is in the picture's file if that is of today."""
        return self.picture if isinstance(self.picture, str) else digest(self.picture)


def figures() -> dict[str, Figure]:
    """Return all figures by name; each is the file figures/NAME.svg."""
    results, sweep, card = read_results(), compare(sorted(SWEEP.glob("*.json"))), read_json(CARD)
    decode, roof = results["beside_vllm"], results["roofline_h200"]
    decoded = _made(decode, "run")
    compress, machine = results["compress_cpu"], _measured(card)
    by_size, by_speed = tradeoffs(sweep, sweep.groups[0], "pareto")
    charts = {
        "pareto": (by_size, f"{_ranks(sweep)}. {machine}"),
        "pareto_speed": (by_speed, f"The same ranks. {machine}"),
        "damage": (_damage(compress, card), _made(compress, "optkit")),
        "speed": (replace(speed(card)[1], title="Where the speed comes from"), f"SmolLM2-135M. {machine}"),
        "bits": (_accuracy_by_bits(results["methods"]), _made(results["methods"], "optkit")),
        "batch": (_decode_by_batch(decode), f"{decoded[:-1]}, FP8 {decode.sources['fp8'].date}."),
        "roofline": (_roofline(decode, roof), f"The roof: {_made(roof, 'optkit')} The points: {decoded}"),
    }
    place = Path("artifacts", "sweep_int4", CARD.stem)
    shown = terminal(short_scorecard(card, place), f"optkit show {place}")
    return {
        **{name: Figure(chart.title, caption, chart) for name, (chart, caption) in charts.items()},
        "terminal": Figure("A scorecard on a terminal", machine, shown),
    }


def markdown(name: str, figure: Figure) -> str:
    """Return the lines of a page that show a figure."""
    return f"![{figure.title}](figures/{name}.svg)\n\n{wrapped(f'*{figure.caption}*')}"


def _measured(card: Scorecard) -> str:
    found = card.environment
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "optkit"))
    return f"{found['device_name']}, {found['cpu_threads']} threads; {versions}; {card.created[:10]}."


def _made(result: Result, *sources: str) -> str:
    said = dict.fromkeys(conditions(result.sources[name]) for name in sources)
    return ". ".join([*([result.model] if result.model else []), *said]) + "."


def _ranks(comparison: Comparison) -> str:
    said = (f"{each.rank} {each.label}" for each in map(comparison.entry, comparison.groups[0].entries))
    return re.sub("bits(.)-group_size", r"\1 bits-", ", ".join(said))


def _damage(result: Result, card: Scorecard) -> Chart:
    """Return the waterfall of a recipe with several stages, as a scorecard with these numbers has it."""
    same = {"name": "kl_divergence", "unit": "nats/token", "higher_is_better": False, "protocol": result.protocol}
    rungs = tuple(
        Rung(stage=re.sub("`|,.*", "", row.name), metrics=(Metric(value=_number(row, "kl_plain"), **same),))
        for row in result.rows
        if "kl_plain" in row.values
    )
    return damage(card.model_copy(update={"attribution": rungs}))[0]


def _number(row: Row, key: str) -> float:
    value = row.values[key]
    return float(value.value if isinstance(value, Interval) else value)


def _accuracy_by_bits(result: Result) -> Chart:
    """Return divergence against bits, each method named beside its point as far as there is room."""
    height, domain = 520, (0.005, 0.8)
    step = math.exp(LABEL * math.log(domain[1] / domain[0]) / (height - 70))
    measured = [row for row in result.rows if "kl_dithered" in row.values]
    marks = []
    for bits, _, colour, at, anchor in FAMILIES:
        rows = sorted((row for row in measured if int(_number(row, "bits")) in bits), key=_divergence_of)
        places = _apart([_divergence_of(row) for row in rows], step)
        points = [
            {"bits": _number(row, "bits"), "kl": _divergence_of(row), "name": _short(row), "at": at, "place": place}
            for row, place in zip(rows, places, strict=True)
        ]
        line = {"x1": "bits", "y1": "kl", "x2": "at", "y2": "place", "stroke": paint("grey"), "strokeOpacity": 0.5}
        words = {"text": "name", "fontSize": 11, "textAnchor": anchor, "dx": 3 if anchor == "start" else -3}
        marks += [
            Mark("link", points, line),
            Mark("dot", points, {"x": "bits", "y": "kl", "fill": paint(colour), "r": 5}),
            Mark("text", points, {"x": "at", "y": "place", "fill": paint("ink"), **words}),
        ]
    return Chart(
        "bits",
        "Divergence against bits, every method",
        marks,
        {"label": "bits a quantized weight, with scales", "domain": [1.5, 8.4], "grid": True, "tickFormat": "~g"},
        {"type": "log", "label": "KL, nats a token", "domain": list(domain), "grid": True, "tickFormat": "~g"},
        keys=[Key(words, colour) for _, words, colour, _, _ in FAMILIES],
        height=height,
    )


def _divergence_of(row: Row) -> float:
    return _number(row, "kl_dithered")


def _short(row: Row) -> str:
    return re.sub("`|, 3 bits|, symmetric 64|, bf16", "", row.name)


def _apart(values: Sequence[float], step: float) -> list[float]:
    """Return rising positive values moved as little as it takes to lie `step` times apart."""
    groups: list[list[float]] = []  # of logarithms, each with the index of its value taken off
    for index, value in enumerate(values):
        groups.append([math.log(value) - index * math.log(step)])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    found = (_mean(group) for group in groups for _ in group)
    return [math.exp(value + index * math.log(step)) for index, value in enumerate(found)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _decode_by_batch(result: Result) -> Chart:
    marks, batches = [], []
    for engine, weights, colour in ENGINES:
        points = [
            {"batch": str(each.values["batch"]), "rate": rate} for each, rate in _decoded(result, engine, weights)
        ]
        batches += [each["batch"] for each in points]
        marks += [
            Mark("lineY", points, {"x": "batch", "y": "rate", "stroke": paint(colour), "strokeWidth": 2}),
            Mark("dot", points, {"x": "batch", "y": "rate", "fill": paint(colour), "r": 4}),
        ]
    return Chart(
        "batch",
        "Decode against batch",
        marks,
        {"type": "point", "label": "sequences in the batch", "domain": list(dict.fromkeys(batches))},
        {"type": "log", "label": "tokens per second", "grid": True, "tickFormat": "~s"},
        keys=[Key(f"{engine}, {weights}", colour, "line") for engine, weights, colour in ENGINES],
        height=380,
    )


def _decoded(result: Result, name: str, weights: str) -> Iterator[tuple[Row, float]]:
    for row in result.rows:
        if (row.name, row.values["weights"]) == (name, weights):
            yield row, _number(row, "decode")


def _roofline(decode: Result, roof: Result) -> Chart:
    """Return what a step computes against what it computes for a byte of weights, below the roof."""
    found = {row.name: _number(row, "measured") for row in roof.rows}
    bandwidth, most = found["reading"], found["products in bfloat16"]
    work = 2 * (LAYERS + HEAD)
    edge = most / bandwidth
    line = [{"x": x, "y": y} for x, y in ((0.7, 0.7 * bandwidth), (edge, most), (1500, most))]
    marks = [Mark("lineY", line, {"x": "x", "y": "y", "stroke": paint("ink"), "strokeWidth": 2})]
    drawn = [each for each in ENGINES if each[1] in BYTES]
    for engine, weights, colour in drawn:
        read = LAYERS * BYTES[weights] + 2 * HEAD
        points = [
            {"x": _number(each, "batch") * work / read, "y": rate * work / 1e12, "batch": str(each.values["batch"])}
            for each, rate in _decoded(decode, engine, weights)
        ]
        marks.append(Mark("dot", points, {"x": "x", "y": "y", "fill": paint(colour), "r": 5}))
        if engine == "optkit":
            marks.append(Mark("text", points, {"x": "x", "y": "y", "text": "batch", "dx": 18, "fill": paint("ink")}))
    return Chart(
        "roofline",
        "Decode below the roof of an H200",
        marks,
        {"type": "log", "label": "operations for each byte of weights", "grid": True, "tickFormat": "~g"},
        {"type": "log", "label": "TFLOP/s", "grid": True, "tickFormat": "~g"},
        keys=[
            Key("what reading and bfloat16 products allow", "ink", "line"),
            *(Key(f"{engine}, {weights}", colour) for engine, weights, colour in drawn),
        ],
        height=380,
    )
