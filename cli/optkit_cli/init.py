"""`optkit init`: write a first recipe from a few answers, and say what it will cost here."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optkit.errors import RecipeError, StageError, UsageError
from optkit_cli.options import FILE, Command

if TYPE_CHECKING:
    from optkit.plan import Plan
    from optkit.recipe.first_recipe import Answers

CHOICES = {
    "target": ("What will open the artifact", ("vllm", "onnx", "transformers", "llama.cpp")),
    "device": ("Which device will it run on", ("cpu", "cuda")),
    "effort": ("Quick (no or little text), or thorough (loses less)", ("quick", "thorough")),
}
MODEL = "smollm2-135m"


class Size(click.ParamType[str]):
    """`0.3x` of the unmodified model, or a size: `4 GB`."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the size as gates write it; empty for none."""
        from optkit.common.byte_sizes import size_bytes

        if not value:
            return value
        share = re.fullmatch(r"(0?\.\d+|1(?:\.0*)?)x", value)
        try:
            if not (share and float(share[1])):
                size_bytes(value)
            return value
        except ValueError as error:
            self.fail(f"{error} A part of the unmodified model is 0.3x.", param, ctx)


@click.command(cls=Command, short_help="Write a first recipe from a few answers.")
@click.argument("file", metavar="[FILE]", type=FILE, default="recipe.yaml")
@click.option("--model", metavar="MODEL", help="A built-in name, a directory, a .gguf file or a hub id.")
@click.option("--target", type=click.Choice(CHOICES["target"][1]), help="What will open the artifact.")
@click.option("--device", type=click.Choice(CHOICES["device"][1]), help="What the artifact will run on.")
@click.option("--size", type=Size(), metavar="SIZE", help="Largest size of the artifact: 0.3x of the model, or 4GB.")
@click.option("--effort", type=click.Choice(CHOICES["effort"][1]), help="How long it may take.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
def command(file: Path, force: bool, **given: str | None) -> None:
    """Write FILE [recipe.yaml]: a commented recipe, and what it will cost on this machine.

    On a terminal it asks for what no option says. Elsewhere it takes smollm2-135m, vllm, the best
    device that is here, 4 bits, and quick.
    """
    from optkit.common.atomic import write_text_atomically
    from optkit.common.visible import visible
    from optkit.recipe.first_recipe import Answers
    from optkit_cli.output import show
    from optkit_cli.plan_view import cost_line, doomed

    if file.exists() and not force:
        raise UsageError("there is a file of this name", where=str(file), remedy="Name another, or add --force")
    answers = Answers(**_asked(given))
    text, plan = _fitting(answers, file)
    write_text_atomically(file, text)
    show(f"{visible(str(file))}: {plan.recipe.description}", cost_line(plan), *doomed(plan), *plan.forecasts)
    show(f"\nRead it, then: optkit run {visible(str(file))}")


def _asked(given: dict[str, str | None]) -> dict[str, Any]:
    """Return every answer: of an option, of the person at the terminal, or the usual one."""
    from optkit.environment import driver_version

    asks = at_terminal()
    usual = {"target": "vllm", "device": "cuda" if driver_version() else "cpu", "effort": "quick"}
    questions: dict[str, tuple[str, Any, str]] = {
        "model": ("Model (a name, a directory, a .gguf file or a hub id)", str, MODEL),
        **{name: (text, click.Choice(known), usual[name]) for name, (text, known) in CHOICES.items()},
        "size": ("Size, e.g. 0.3x or 4GB (empty: as small as is still good)", Size(), ""),
    }
    return {
        name: given[name] or (click.prompt(text, type=kind, default=default, err=True) if asks else default)
        for name, (text, kind, default) in questions.items()
    }


def at_terminal() -> bool:
    """Say whether somebody can answer."""
    return sys.stdin is not None and sys.stdin.isatty()


def _fitting(answers: Answers, file: Path) -> tuple[str, Plan]:
    """Return the recipe of the first form that is small enough, and its plan on this machine."""
    from optkit import pipeline
    from optkit.common.byte_sizes import size_text
    from optkit.recipe.recipe import load_recipe

    smallest: tuple[int, str] | None = None
    refused: StageError | None = None
    for form in answers.forms():
        text = answers.recipe(form, shlex.quote(file.name))
        try:
            plan = pipeline.plan(load_recipe(text))
        except StageError as error:
            refused = refused or error
            continue
        except RecipeError as error:
            why, remedy = error.problems[0].message, "For an encoder: optkit run minilm_onnx_int8 --model MODEL"
            raise _no_recipe(answers, why, remedy) from error
        beside = _beside(plan)
        before, after = plan.steps[0].size_bytes + beside, plan.steps[-1].size_bytes + beside
        if not answers.size or after <= _most(answers.size, before):
            return text, plan
        found = after, f"{form.name}, {size_text(after)} ({after / before:.2f}x)"
        smallest = min(smallest or found, found)
    if smallest is None and refused:
        remedy = "Start from a recipe of `optkit list recipes`, and set that there"
        raise _no_recipe(answers, str(refused).rstrip("."), remedy) from refused
    raise UsageError(
        f"no form that {answers.target} opens on {answers.device} is so small",
        where=f"--size {answers.size}",
        why=f"The smallest is {smallest[1] if smallest else 'none'}",
        remedy="Take a larger size, or remove parts of the model first: optkit explain prune_structured",
    )


def _no_recipe(answers: Answers, why: str, remedy: str) -> UsageError:
    return UsageError("no recipe of init is for this model", where=f"--model {answers.model}", why=why, remedy=remedy)


def _beside(plan: Plan) -> int:
    """Return the bytes of what deploys beside the weights: a tokenizer can be a fifth of a small model."""
    from optkit.model.companions import find_companions
    from optkit.source.models import locate_model

    place = locate_model(plan.recipe.model)
    return sum(path.stat().st_size for path in find_companions(place).kept.values()) if place else 0


def _most(size: str, before: int) -> float:
    from optkit.common.byte_sizes import size_bytes

    return float(size[:-1]) * before if size.endswith("x") else size_bytes(size)
