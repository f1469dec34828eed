"""What a comparison says: the record that the terminal, the report and every other form are drawn from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, computed_field

from optkit.common.frozen import Frozen
from optkit.recipe.gates import Verdict, overall
from optkit.scorecard.scorecard import EXIT_STATUS, GateResult

Role = Literal["quality", "size", "speed", "memory", "other"]
Relation = Literal["better", "worse", "none"]
"""`none`: no measurable difference. Its interval holds 1, or it is below the noise floor."""


class Column(Frozen):
    """One metric, measured by one protocol and, if it is timed, on one device."""

    key: str
    """Unique here: `decode_tokens_per_s[batch=1]`, with ` #2` behind it for a second protocol."""
    title: str
    """The shortest text that tells it from the others: name, and labels only if they differ."""
    name: str
    """The metric's."""
    labels: dict[str, int | str] = {}
    unit: str
    higher_is_better: bool
    role: Role
    protocol: str
    environment: dict[str, str] = {}
    """What a timing was measured on: device, cores, threads and versions; empty if it is none."""


class Cell(Frozen):
    """What one column says of one scorecard. A metric that was not measured has no cell."""

    column: str
    """Key of the column."""
    value: float | None
    """None if measuring it failed."""
    interval: tuple[float, float] | None = None
    baseline: float | None = None
    """The same of the unmodified model."""
    baseline_interval: tuple[float, float] | None = None
    ratio: float | None = None
    """To the unmodified model."""
    ratio_interval: tuple[float, float] | None = None
    change: Relation | None = None
    """What the ratio says beyond interval and noise floor; None if there is no ratio."""
    failure: str = ""


class Difference(Frozen):
    """One axis of a scorecard beside that of another, paired if both were measured on the same data."""

    axis: str
    """Key of a column."""
    relative: bool
    """`value` is the ratio of this one's number to the other's; else the difference, in the unit."""
    value: float
    interval: tuple[float, float] | None = None
    """95% for all axes together; None if the numbers have no error."""
    relation: Relation


class Entry(Frozen):
    """One scorecard among the others."""

    label: str
    """Unique here: the recipe's name, with its place if several have it."""
    place: str
    """Directory of the artifact, or the file of a bare scorecard."""
    artifact_key: str
    created: str
    model: str
    device: str
    """Where it was measured, e.g. `cpu AMD EPYC`."""
    fields: dict[str, Any] = {}
    """The fields of its recipe that differ among the entries, e.g. `stages.0.rtn.bits: 4`."""
    verdict: Verdict
    """Of its recipe's gates."""
    gates: tuple[GateResult, ...] = ()
    """Of its recipe."""
    requirements: tuple[GateResult, ...] = ()
    """What `--require` asked; the worst row of each."""
    meets: Verdict = Verdict.PASS
    """The worst of the requirements."""
    passes: Verdict = Verdict.PASS
    """The worst of both, its gates and the requirements; what does not pass is not picked."""
    group: int | None = None
    """Index in `groups`; None if it has none of the axes."""
    rank: int | None = None
    """1 is first in its group: the pick, then the front from the knee on, then what is dominated."""
    front: bool = False
    """No other in its group is at least as good in all and measurably better in one."""
    knee: bool = False
    pick: bool = False
    dominated_by: tuple[str, ...] = ()
    """Labels of those on the front that dominate it, three at most."""
    differences: tuple[Difference, ...] = ()
    """To the pick of its group, else to its knee, else to the first; empty of that one itself."""
    cells: tuple[Cell, ...] = ()

    @property
    def gated(self) -> bool:
        """Its recipe has gates."""
        return bool(self.gates)

    def cell(self, column: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.column == column), None)


class Group(Frozen):
    """Entries that can be ranked: every axis was measured by one protocol, and timed on one device."""

    axes: tuple[str, ...]
    """Keys of columns: quality, size and speed unless others were asked for."""
    entries: tuple[str, ...]
    """Labels, in the order of their ranks."""
    front: tuple[str, ...]
    knee: str | None = None
    """Of those that pass and that no other of them dominates, the nearest to the best of all axes;
    None if there are two of them, which are both ends.
    """
    pick: str | None = None
    """Best by `--best` among those that pass; the knee if no metric was named."""
    bests: dict[str, tuple[str, ...]] = {}
    """For the key of each axis, of those that pass the best by that axis alone, and its equals: those
    that are not measurably worse.
    """
    why: str = ""
    """In one sentence, why the pick, or why there is none."""
    differs: tuple[str, ...] = ()
    """What differs from the first group, one line for each axis."""


class Floor(Frozen):
    """What the unmodified model differs from itself; a difference below it is none."""

    column: str
    """Key of a column."""
    value: float
    relative: bool
    """`value` is a fraction of the number (0.01: 1%), else it has the column's unit."""
    source: str
    """What was varied, e.g. `batch 8, attention eager`."""


class LeftOut(Frozen):
    """A file that was found below a directory and is not compared."""

    place: str
    why: str


class Warned(Frozen):
    """What scorecards ask someone to act on."""

    text: str
    entries: tuple[str, ...]
    """Labels of those that say so."""


class Comparison(Frozen):
    """Several scorecards, and which of them to take."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Raised when the meaning of a field changes."""
    entries: tuple[Entry, ...]
    """In the order of groups and ranks."""
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    floors: tuple[Floor, ...] = ()
    best: str | None = None
    """The metric of `--best`."""
    require: tuple[str, ...] = ()
    """The limits of `--require`."""
    notes: tuple[str, ...] = ()
    """What a reader must know: scorecards found twice, axes that few have."""
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[Warned, ...] = ()
    """Those of the scorecards and engines that cannot use an artifact; what most say comes first."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """PASS if any entry passes, or nothing was asked for; else INCONCLUSIVE if any may."""
        found = {entry.passes for entry in self.entries} if self.require or self.best else {Verdict.PASS}
        return next((each for each in (Verdict.PASS, Verdict.INCONCLUSIVE) if each in found), overall([*found]))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_status(self) -> int:
        """0 if an entry passes or nothing was asked for, 3 if none does, 4 if one may."""
        return EXIT_STATUS[self.verdict]

    def column(self, key: str) -> Column:
        return next(column for column in self.columns if column.key == key)

    def entry(self, label: str) -> Entry:
        return next(entry for entry in self.entries if entry.label == label)

    def members(self, group: Group) -> list[Entry]:
        """Return the entries of a group, in the order of their ranks."""
        index = next(index for index, each in enumerate(self.groups) if each is group or each == group)
        return [entry for entry in self.entries if entry.group == index]
