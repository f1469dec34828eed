"""`optkit sweep`: make the artifacts of all combinations of a recipe's matrix, and compare them."""

from __future__ import annotations

from typing import Any

import click

from optkit_cli.options import DIRECTORY, Command, assignment, takes


@click.command(cls=Command, short_help="Make and compare all combinations of a recipe.")
@takes("recipe", "model", "set")
@click.option("--out", metavar="DIR", type=DIRECTORY, help="Directory of the artifacts [artifacts/RECIPE].")
@click.option("--max-hours", type=click.FloatRange(min=0, min_open=True), metavar="HOURS", help="Begin nothing later.")
@takes("against", "comparison")
@click.option("--keep", metavar="best:N", help="Delete the weights of what is dominated, but for the N best.")
@takes("trials")
@click.option(
    "--sampler",
    metavar="NAME",
    type=click.Choice(["grid", "random", "tpe", "nsga2"]),
    help="Who chooses them: grid (the first), random [the default], tpe (searches for --best), "
    "nsga2 (for the front along each --axis).",
)
@click.option("--seed", default=0, metavar="N", help="The seed of what a sampler draws [0].")
@click.option("--retry", is_flag=True, help="Try again what failed before.")
@click.option(
    "--executor",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Who makes the artifacts: local (this machine, one after another), ray, slurm.",
)
@click.option("--address", metavar="HOST:PORT", help="The Ray cluster of this machine; without it Ray runs here alone.")
@click.option(
    "--slurm",
    metavar="OPTION=VALUE",
    type=assignment,
    multiple=True,
    help="An option of sbatch, e.g. partition=gpu; time counts minutes; repeatable.",
)
@takes("retime", "place", "json", "quiet", "trust")
def command(
    recipe: str,
    require: tuple[str, ...],
    best: str | None,
    axes: tuple[str, ...],
    executor: str,
    address: str | None,
    slurm: tuple[str, ...],
    **asked: Any,
) -> int:
    """Make the artifact of each combination of RECIPE's matrix, time them in turns, and compare them.
    RECIPE is a file, or a name from `optkit list recipes`.

    A field with several values is an axis too: --set stages.0.gptq.bits=3,4,8. The same command
    goes on with what is not finished. Exit status: 0 if a combination passes all gates, 1 if one
    failed, 3 if none passes, 4 if none is known to.
    """
    from optkit.sweep.executors.registry import executor_of
    from optkit.sweep.run import exit_status, sweep
    from optkit_cli.output import only_the_result_on_stdout, print_result
    from optkit_cli.sweep_view import closing_view, watching

    choice: dict[str, Any] = {"require": require, "best": best, "axes": axes}
    with only_the_result_on_stdout(), watching() as (watcher, progress):
        made_by = executor_of(executor, address=address, slurm=dict(each.split("=", 1) for each in slurm))
        done = sweep(recipe, executor=made_by, watcher=watcher.show, progress=progress, **choice, **asked)
    status = exit_status(done.record)
    document = {**done.record.model_dump(mode="json"), "directory": str(done.directory), "exit_status": status}
    print_result(document, lambda: closing_view(done.record, done.directory, **choice))
    return status
