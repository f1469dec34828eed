"""Options that several commands share, and what their values mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from optkit.errors import did_you_mean
from optkit_cli import completion

REMOTE = "OPTKIT_STORE_REMOTE"
CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Invocation:
    """What the words of one command line say about the program rather than about the work."""

    debug: bool = False
    as_json: bool = False
    """The result is one JSON document."""
    quiet: bool = False
    """Of progress and messages only warnings are printed."""
    logs_json: bool = False
    """Progress and messages are lines of JSON."""
    document: str = ""
    """The JSON that stdout gets once the command is over."""
    over: bool = False


def invocation() -> Invocation:
    """Return what the words of this command line say; without one nothing."""
    context = click.get_current_context(silent=True)
    return Invocation() if context is None else context.ensure_object(Invocation)


def flag(name: str, *words: str, help: str) -> Callable[[Any], Any]:
    """Return an option that sets a field of the invocation, before the others are read."""

    def tell(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
        if wanted:
            setattr(context.ensure_object(Invocation), name, True)

    return click.option(*words, name, is_flag=True, expose_value=False, is_eager=True, callback=tell, help=help)


debug_option = flag("debug", "--debug", help="Show the traceback of an error.")


class Command(click.Command):
    """A command that takes `--debug` and `-h` as the group does, before or after its name."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"context_settings": CONTEXT_SETTINGS, **settings})
        debug_option(self)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, with the shared store named for the processes that it starts too."""
        before = os.environ.get(REMOTE)
        os.environ |= {REMOTE: ctx.meta[REMOTE]} if REMOTE in ctx.meta else {}
        try:
            return super().invoke(ctx)
        finally:
            os.environ.pop(REMOTE, None)
            os.environ |= {REMOTE: before} if before else {}


class Group(click.Group):
    """Commands below one word; it takes `--debug` and `-h` like each of them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        debug_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words before a command's name; tell an option of the command its place.
        Raises UsageError for words that no JSON file could hold.
        """
        words = list(args)
        for word in words:
            try:
                word.encode()
            except UnicodeEncodeError as error:
                shown: str | bytes = word
                with suppress(UnicodeEncodeError):  # of surrogates that stand for no byte
                    shown = word.encode(errors="surrogateescape")
                what = f"{shown!a} is not UTF-8 text. Names are kept in JSON, which is. Rename it."
                raise click.UsageError(what, ctx) from error
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = next((word for word in words if word in self.list_commands(ctx)), None)
            found = self.get_command(ctx, name) if name else None
            if found and any(error.option_name in parameter.opts for parameter in found.params):
                message = (
                    f"{error.option_name} belongs behind the command: {ctx.command_path} {name} {error.option_name} ..."
                )
                raise click.UsageError(message, ctx) from error
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names, or say which one was probably meant."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"There is no command '{args[0]}'.{did_you_mean(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)


def device(value: str) -> str:
    """Return `cpu`, `cuda` or `cuda:N`, as torch names it."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise click.BadParameter(f"'{value}' is not a device. Use cpu, cuda or cuda:N.")
    return value


def assignment(value: str) -> str:
    """Return `PATH=VALUE`, e.g. `stages.0.gptq.group_size=32`; `load_recipe` follows the path."""
    path, equals, _ = value.partition("=")
    if not (path.strip() and equals):
        raise click.BadParameter(f"'{value}' has no '='. Write it as stages.0.gptq.group_size=32.")
    return value


def all_of(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return one decorator that adds the options in the order given."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def number_option(flag: str, default: int, help: str, least: int = 1) -> Callable[[Function], Function]:
    """Return an option that takes a whole number."""
    return click.option(
        flag, metavar="N", type=click.IntRange(min=least), default=default, show_default=True, help=help
    )


class Place(click.Path):
    """A path, whose `~` is the home directory: shells leave it in `--out=~/x`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(RuntimeError):  # of a user whom nobody knows
            value = Path(value).expanduser()
        return super().convert(value, param, ctx)


DIRECTORY = Place(path_type=Path, file_okay=False)
FILE = Place(path_type=Path, dir_okay=False)


def _share(context: click.Context, _parameter: click.Parameter, url: str | None) -> None:
    if url:
        context.meta[REMOTE] = url


def _want_json(context: click.Context, _parameter: click.Parameter, form: str) -> None:
    context.ensure_object(Invocation).logs_json = form == "json"


SHARED: dict[str, Callable[[Any], Any]] = {
    "recipe": click.argument("recipe", metavar="RECIPE", shell_complete=completion.recipes),
    "model": click.option(
        "--model",
        metavar="MODEL",
        help="Take this model instead of the recipe's: a built-in name, a directory, a .gguf file or a hub id.",
    ),
    "set": click.option(
        "--set",
        "overrides",
        metavar="PATH=VALUE",
        type=assignment,
        multiple=True,
        help="Change one value of the recipe, e.g. seed=1; repeatable.",
    ),
    "device": click.option(
        "--device", metavar="DEVICE", type=device, help="cpu, cuda or cuda:N; by default the best that is here."
    ),
    "data": click.option(
        "--data",
        metavar="DIR",
        type=Place(path_type=Path, exists=True, file_okay=False),
        envvar="OPTKIT_DATA",
        help="Directory with local copies of data sets [$OPTKIT_DATA].",
    ),
    "store": click.option(
        "--store",
        metavar="DIR",
        type=DIRECTORY,
        envvar="OPTKIT_STORE",
        help="Directory of finished steps [$OPTKIT_STORE, ~/.cache/optkit].",
    ),
    "remote": click.option(
        "--remote",
        metavar="URL",
        expose_value=False,
        callback=_share,
        help="Store that machines share, e.g. s3://bucket/prefix [$OPTKIT_STORE_REMOTE].",
    ),
    "shared": click.option(
        "--remote",
        metavar="URL",
        required=True,
        envvar=REMOTE,
        help="Store that machines share [$OPTKIT_STORE_REMOTE].",
    ),
    "retime": click.option(
        "--retime", is_flag=True, help="Measure timings again, of both models, e.g. on a machine that is quiet now."
    ),
    "against": click.option(
        "--against",
        metavar="ARTIFACT",
        type=Place(path_type=Path),
        help="Artifact or scorecard.json of the last release, for gates `of previous`; "
        "`none` before the first release.",
    ),
    "trials": click.option("--trials", metavar="N", type=click.IntRange(min=1), help="Take N of the combinations."),
    "json": flag("as_json", "--json", help="Print one JSON document on stdout, everything else on stderr."),
    "trust": click.option(
        "--trust-remote-code", is_flag=True, help="Run the code of others that comes with the model; read it first."
    ),
    "verbose": click.option(
        "--verbose", "-v", is_flag=True, help="Print every number, its protocol, and how the artifact was made."
    ),
    "quiet": all_of(
        flag("quiet", "--quiet", "-q", help="Print the result and warnings only."),
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            expose_value=False,
            is_eager=True,
            callback=_want_json,
            help="Print progress and messages on stderr as text [the default], or each as a line of JSON.",
        ),
    ),
    "artifact": click.argument(
        "artifact", metavar="ARTIFACT", type=Place(path_type=Path), shell_complete=completion.artifacts
    ),
    "model_or_artifact": click.argument("model", metavar="MODEL_OR_ARTIFACT", shell_complete=completion.artifacts),
    "artifacts": click.argument(
        "places",
        metavar="ARTIFACT...",
        type=Place(path_type=Path),
        nargs=-1,
        required=True,
        shell_complete=completion.artifacts,
    ),
    "comparison": all_of(
        click.option(
            "--require",
            metavar="LIMIT",
            multiple=True,
            help='Take only what keeps this limit, e.g. "perplexity<=1.05x" or "decode_tokens_per_s[batch=8]>=2x"; '
            "repeatable.",
        ),
        click.option("--best", metavar="METRIC", help="Pick the best by this metric, e.g. size_bytes."),
        click.option(
            "--axis",
            "axes",
            metavar="METRIC",
            multiple=True,
            help="Rank by this metric; repeatable. By default a quality, a size and a speed.",
        ),
    ),
}
"""What several commands take, by the name that `takes` knows it by."""


def takes(*names: str) -> Callable[[Function], Function]:
    """Return one decorator that adds arguments and options of `SHARED`, in the order given."""
    return all_of(*(SHARED[name] for name in names))


SHARED["place"] = takes("device", "data", "store", "remote")
