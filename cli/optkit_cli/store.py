"""`optkit store`: what the store holds, and deleting what is no longer wanted."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optkit.common.cache import default_store
from optkit.errors import UsageError
from optkit_cli.options import CONTEXT_SETTINGS, Command, Group, takes
from optkit_cli.output import print_result

if TYPE_CHECKING:
    from optkit.store.remote import Remote

SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def age(value: str) -> int:
    """Return the seconds of `30d`."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]+)?)\s*([mhdw])", value.strip())
    if not found:
        raise click.BadParameter(f"'{value}' is no age. Write 45m, 12h, 30d or 2w.")
    return int(float(found[1]) * SECONDS[found[2]])


def size(value: str) -> int:
    """Return the bytes of `20GB`; `0B` is a size too."""
    from optkit.common.byte_sizes import size_bytes

    try:
        return size_bytes(value, least=0)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.group(cls=Group, context_settings=CONTEXT_SETTINGS, short_help="See, prune and share what was finished before.")
def command() -> None:
    """See, prune and share the store: the finished steps and numbers that are not made again.

    Everything in it can be made again, so deleting is always safe; artifacts are not touched.
    """


@command.command("show", cls=Command, short_help="Print what the store holds.")
@click.option("--remote", metavar="URL", help="Print what the store holds that machines share.")
@takes("store", "json")
def show_command(remote: str | None, store: Path | None) -> None:
    """Print the store's place, size, steps (model, size, last use) and unfinished work."""
    from optkit.store.contents import survey, survey_remote
    from optkit.store.store import Store
    from optkit_cli.store_view import contents_view

    contents = survey_remote(_reached(remote)) if remote is not None else survey(Store(store or default_store()))
    document = {**contents.model_dump(mode="json"), "size_bytes": contents.size_bytes}
    print_result(document, lambda: contents_view(contents))


@command.command("push", cls=Command, short_help="Give steps to a store that machines share.")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@takes("shared", "store", "json", "quiet")
def push_command(keys: tuple[str, ...], remote: str, store: Path | None) -> None:
    """Push all finished steps and numbers, or those whose keys begin with KEY.
    Files that are there already stay, but those of a KEY go up again.
    """
    from optkit.store.exchange import push
    from optkit.store.store import Store
    from optkit_cli.progress import open_progress
    from optkit_cli.store_view import exchanged_view

    done = push(Store(store or default_store()), _reached(remote), keys, open_progress())
    print_result(done, lambda: exchanged_view(done, "pushed to"))


@command.command("pull", cls=Command, short_help="Take steps from a store that machines share.")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--recipe", metavar="RECIPE", help="Pull what a run of this recipe would begin with, and its numbers.")
@takes("shared", "store", "json", "quiet")
def pull_command(keys: tuple[str, ...], recipe: str | None, remote: str, store: Path | None) -> None:
    """Pull the steps and numbers whose keys begin with KEY, or what a recipe needs."""
    from optkit.store.exchange import pull
    from optkit.store.store import Store
    from optkit_cli.progress import open_progress
    from optkit_cli.store_view import exchanged_view

    if not (keys or recipe):
        raise UsageError("nothing says what to pull", remedy="Name keys, or give --recipe RECIPE")
    here, there, progress = Store(store or default_store()), _reached(remote), open_progress()
    if recipe:
        from optkit import pipeline
        from optkit.measuring.evaluation import metric_keys
        from optkit.store.remote import METRICS
        from optkit.store.shared import SharedStore

        wanted = pipeline.plan(recipe, store=SharedStore(here.root, there, progress))
        keys += tuple(step.key for step in wanted.fetched)
        keys += tuple({*metric_keys(*wanted.evals, *wanted.further)} & {*there.keys(METRICS)})
    done = pull(here, there, keys, progress)
    print_result(done, lambda: exchanged_view(done, "pulled from"))


def _reached(url: str) -> Remote:
    """Return the shared store of a URL, of which it is sure that it answers."""
    from optkit.store.remote import Remote

    remote = Remote(url)
    remote.check()
    return remote


@command.command("prune", cls=Command, short_help="Delete old steps, or until the rest fits.")
@click.option(
    "--older-than", "older_than_s", metavar="AGE", type=age, help="Delete what was not used for so long, e.g. 30d."
)
@click.option(
    "--max-size",
    "max_bytes",
    metavar="SIZE",
    type=size,
    help="Delete steps, those used longest ago first, until the rest fits.",
)
@click.option("--all", "everything", is_flag=True, help="Delete all steps and numbers.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted; delete nothing.")
@click.option("--remote", metavar="URL", help="Prune the store that machines share; this machine's stays.")
@takes("store", "json")
def prune_command(
    older_than_s: float | None,
    max_bytes: int | None,
    everything: bool,
    dry_run: bool,
    remote: str | None,
    store: Path | None,
) -> None:
    """Delete steps from the store. What a running optkit works on or needs stays, and artifacts
    keep their files.

    Checkpoints of unfinished steps, and what teachers said, go by age or with --all. With --remote
    the age counts since a step was made, and uploads that broke off go after a day.
    """
    from optkit.store.contents import prune
    from optkit.store.remote_pruning import prune_remote
    from optkit.store.store import Store
    from optkit_cli.store_view import pruned_view

    if everything and (older_than_s is not None or max_bytes is not None):
        raise UsageError("--all deletes everything", remedy="Leave out --older-than and --max-size")
    if not everything and older_than_s is None and max_bytes is None:
        raise UsageError("nothing says what to delete", remedy="Give --older-than 30d, --max-size 20GB or --all")
    delete = (
        partial(prune_remote, _reached(remote))
        if remote is not None
        else partial(prune, Store(store or default_store()))
    )
    done = delete(older_than_s=older_than_s, max_bytes=max_bytes, everything=everything, dry_run=dry_run)
    document = {**done.model_dump(mode="json"), "freed_bytes": done.freed_bytes, "dry_run": dry_run}
    print_result(document, lambda: pruned_view(done, dry_run=dry_run))
