"""A verification on the terminal: each check with what it found, then the loading table."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from optkit.errors import OptkitError
from optkit.verification.verify import Verified
from optkit_cli.scorecard_view import loading_view
from optkit_cli.tables import indented, spaced

FAIL = ("FAIL", "bold red")


def verified_view(found: Verified) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    marks = {True: Text("ok ", style="green"), False: Text("!! ", style="bold red")}
    checks = indented([(marks[check.ok] + Text(check.name), check.detail) for check in found.checks])
    return spaced(checks, *loading_view(found.loading), _closing(found))


def refuse_unasked(found: Verified) -> None:
    """Raise OptkitError for engines that the user named and that could not be asked."""
    skipped = [each for each in found.loading if each.verdict == "skipped"]
    if skipped:
        raise OptkitError(
            "; ".join(f"{each.engine} was not asked, {each.reason}" for each in skipped), where=str(found.artifact)
        )


def _closing(found: Verified) -> Text:
    asked = [each for each in found.loading if each.verdict != "skipped"]
    if not found.whole:
        return Text.assemble(FAIL, f"  the artifact is not sound; no engine was asked  {found.artifact}")
    if not found.loading:
        return Text.assemble(("PASS", "green"), f"  every check holds; no engine was asked  {found.artifact}")
    agreeing = sum(each.verdict == "agrees" for each in asked)
    passed = ("PASS", "green") if asked else ("no engine could be asked", "dim")
    verdict = FAIL if found.exit_status else passed
    return Text.assemble(verdict, f"  {agreeing} of {len(asked)} engines agree  {found.artifact}")
