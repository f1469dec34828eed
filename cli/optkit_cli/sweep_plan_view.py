"""The plan of a sweep on the terminal: its combinations, what they share, and what they will need."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from optkit.sweep.plan import Planned, SweepPlan
from optkit_cli.tables import duration_text, plain_table, size_text


def sweep_plan_view(plan: SweepPlan) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    table = plain_table("combination", "steps", ">size")
    for each in plan.combinations:
        table.add_row(
            Text(each.name), _steps(each), Text(size_text(each.plan.steps[-1].size_bytes if each.plan else 0))
        )
    title = Text.assemble((plan.name, "bold"), (f"  {len(plan.combinations)} combinations · {plan.device}", "dim"))
    return [part for section in (title, table, Text(_closing(plan))) for part in (Text(""), section)]


def _steps(planned: Planned) -> Text:
    if planned.plan is None:
        return Text(f"fails: {planned.reason}", style="bold red")
    pending = {step.key for step in planned.plan.pending}
    said = [(step.kind, "yellow" if step.key in pending else "green") for step in planned.plan.steps]
    said += [(entry.kind, "dim") for entry in planned.plan.recipe.settings]
    return Text(", ").join(Text(kind, style=style) for kind, style in said)


def _closing(plan: SweepPlan) -> str:
    needs = {
        "on disk": plan.disk_bytes,
        "of RAM at most beside Python and torch": plan.ram_bytes,
        "of GPU memory at most": plan.gpu_bytes,
    }
    parts = [f"{plan.pending} of {plan.steps} steps to do, steps shared {plan.shared} times"]
    parts += [f"{size_text(size)} {what}" for what, size in needs.items() if size]
    parts += [f"about {duration_text(plan.seconds)}"] if plan.seconds else []
    parts += [f"the time of {plan.unknown} is unknown (not measured here yet)"] if plan.unknown else []
    return ", ".join(parts)
