"""A plan, or that of a sweep, on the terminal: what is done, what is to do, and what the rest will need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.environment import visible_gpus
from optkit.execute import missing_packages
from optkit.plan import Plan
from optkit_cli.tables import duration_text, plain_table, size_text, spaced

if TYPE_CHECKING:
    from optkit.sweep.plan import Planned, SweepPlan


def plan_view(plan: Plan) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    elsewhere = ", which is not here" if plan.device != "cpu" and not visible_gpus() else ""
    where = f"  {plan.recipe.model.name} · {plan.device}{elsewhere}"
    title = Text.assemble((plan.recipe.name, "bold"), (where, "dim"))
    return spaced(
        title,
        _steps(plan),
        *_memory(plan),
        *(Text(f"note  {step.kind}: {note}") for step in plan.steps for note in step.cost.notes),
        _evals(plan) if plan.evals else Text("nothing is measured", style="dim"),
        cost_line(plan),
        *(Text(line, style="bold red") for line in doomed(plan)),
        *(Text(line, style="dim") for line in plan.forecasts),
    )


def doomed(plan: Plan) -> list[str]:
    """Return why a run of this plan would fail here, as far as that is known."""
    return [*plan.doomed, *(f"not here  {missing}" for missing in missing_packages(plan))]


def _steps(plan: Plan) -> Table:
    rows: list[list[Text | str]] = []
    for step in plan.steps:
        pending = step in plan.pending
        needs = (step.cost.disk_bytes, step.cost.ram_bytes, step.cost.gpu_bytes) if pending else (0, 0, 0)
        sizes = [size_text(size) for size in (step.size_bytes, *needs)]
        rows.append([step.kind, _hit(step.hit, step.remote), step.format, *sizes, _time(step.seconds, pending)])
    rows += [[entry.kind, Text("setting", style="dim")] for entry in plan.recipe.settings]
    return plain_table("step", "store", "leaves", ">size", ">writes", ">RAM", ">GPU", ">time", rows=rows)


def _memory(plan: Plan) -> list[RenderableType]:
    """Return what the peak memory of steps is for, if they say it."""
    told = [step for step in plan.pending if step.cost.by_kind]
    lines = [
        f"{step.kind}: {', '.join(f'{name} {size_text(size)}' for name, size in step.cost.by_kind.items())}"
        for step in told
    ]
    return [Text("\n".join(["peak memory by kind", *(f"  {line}" for line in lines)]), style="dim")] if lines else []


def _evals(plan: Plan) -> Table:
    changed = plan.artifact_key != plan.baseline_key
    rows: list[list[Text | str]] = []
    for each in (*plan.evals, *plan.further):
        baseline = _hit(each.baseline_hit) if changed and each.baseline_key else "-"
        sizes = [size_text(size) for size in (each.cost.ram_bytes, each.cost.gpu_bytes)]
        rows.append([each.kind, _hit(each.hit), baseline, *sizes, _time(each.seconds, each.pending)])
    return plain_table("eval", "artifact", "baseline", ">RAM", ">GPU", ">time", rows=rows)


def _time(seconds: float | None, pending: bool) -> str:
    return "-" if not pending else "unknown" if seconds is None else duration_text(seconds)


def _hit(hit: bool, remote: bool = False) -> Text:
    if remote:
        return Text("remote", style="green")
    return Text("hit", style="green") if hit else Text("miss", style="yellow")


def cost_line(plan: Plan) -> Text:
    """Return what is left to do, and the disk, memory and time that it needs."""
    evals = (*plan.evals, *plan.further)
    unmeasured = sum(each.pending for each in evals)
    fetched = sum(step.size_bytes for step in plan.fetched)
    if not (plan.pending or unmeasured or fetched):
        return Text("nothing to do: a run ends at once")
    steps = f"{len(plan.pending)} of {len(plan.steps)} steps and {unmeasured} of {len(evals)} evals to do"
    steps += f", {size_text(fetched)} to fetch from the shared store" if fetched else ""
    kept = max((step.cost.kept_bytes for step in plan.pending), default=0)
    times = [*(step.seconds for step in plan.pending), *(each.seconds for each in evals if each.pending)]
    return _needs(steps, plan, kept, sum(filter(None, times)), times.count(None))


def sweep_plan_view(plan: SweepPlan) -> list[RenderableType]:
    """Return what to print of a sweep, top to bottom: its combinations, what they share, and what they will need."""
    table = plain_table("combination", "steps", ">size")
    for each in plan.combinations:
        size = each.plan.steps[-1].size_bytes if each.plan else 0
        table.add_row(Text(each.name), _combined(each), Text(size_text(size)))
    title = Text.assemble((plan.name, "bold"), (f"  {len(plan.combinations)} combinations · {plan.device}", "dim"))
    steps = f"{plan.pending} of {plan.steps} steps to do, steps shared {plan.shared} times"
    return spaced(title, table, _needs(steps, plan, 0, plan.seconds, plan.unknown))


def _combined(planned: Planned) -> Text:
    if planned.plan is None:
        return Text(f"fails: {planned.reason}", style="bold red")
    pending = {step.key for step in planned.plan.pending}
    said = [(step.kind, "yellow" if step.key in pending else "green") for step in planned.plan.steps]
    said += [(entry.kind, "dim") for entry in planned.plan.recipe.settings]
    return Text(", ").join(Text(kind, style=style) for kind, style in said)


def _needs(steps: str, plan: Plan | SweepPlan, kept_bytes: int, seconds: float, unknown: int) -> Text:
    sizes = {
        "on disk": plan.disk_bytes,
        "more until a step ends": kept_bytes,
        "of RAM at most beside Python and torch": plan.ram_bytes,
        "of GPU memory at most": plan.gpu_bytes,
    }
    parts = [steps, *(f"{size_text(size)} {what}" for what, size in sizes.items() if size)]
    parts += [f"about {duration_text(seconds)}"] if seconds else []
    parts += [f"the time of {unknown} is unknown (not measured here yet)"] if unknown else []
    return Text(", ".join(parts))
