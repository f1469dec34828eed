"""`optkit explain`: what a stage, an eval, a field, a metric, an error, an exit status or a word means."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import click

from optkit.errors import OptkitError, UsageError
from optkit_cli import completion
from optkit_cli.options import Command

if TYPE_CHECKING:
    from optkit_cli.messages import Message

WIDTH = 100
MOST_MESSAGES = 5
LEAST_LETTERS = 8
"""Of a message without its values: fewer are in any words."""
EXIT_STATUSES = {
    0: "Done; every gate passed.",
    1: "An error. Its message says where, what, why and what to do.",
    2: "The command line or the recipe is wrong. Every problem is named at once, as file:line:column.",
    3: "A gate FAILed; or `verify` found damage, or an engine that refuses the artifact or computes something else.",
    4: "No gate FAILed, and one is INCONCLUSIVE: the measurement cannot tell. Measure more, or on a quiet machine.",
    129: "The terminal was closed (SIGHUP). The same command goes on from the last finished step.",
    130: "Interrupted by Ctrl-C. The same command goes on from the last finished step.",
    143: "Terminated (SIGTERM). The same command goes on from the last finished step.",
}
LISTED = "datasets", "models", "recipes"
RELATIVE = "1x", "x: times the baseline"


@click.command(cls=Command, short_help="Say what a stage, field, metric, error or word means.")
@click.argument("name", metavar="NAME", nargs=-1, required=True, shell_complete=completion.names)
def command(name: tuple[str, ...]) -> None:
    """Print what NAME means: a stage, a setting, a field of these, an eval, a metric, an error, an exit
    status, a word.

    It also says what a data set, a model or a recipe of `optkit list` is.

    Of an error, give some words of its message too: optkit explain "no such model".
    """
    from optkit.common.visible import visible_lines

    for index, page in enumerate(pages(" ".join(name))):
        click.echo(visible_lines(("\n" if index else "") + page))


def pages(name: str) -> list[str]:
    """Return what is known of a name, a page for each of its meanings.
    Raises UsageError with the nearest names.
    """
    found = [page for read in READERS for page in read(name)]
    if not found:
        from optkit.recipe.reference import field_names

        known = {word.lower(): word for word in [*field_names(), *known_names()]}
        near = [f"'{known[word]}'" for word in difflib.get_close_matches(name.lower(), known, n=3)]
        remedy = (
            f"Did you mean {' or '.join(near)}?" if near else "`optkit list stages`, or evals, has what recipes name"
        )
        raise UsageError(f"nothing is called '{name}'", where="explain", remedy=remedy)
    return found


def known_names() -> list[str]:
    """Return every name that has a page, but for parts of messages."""
    from optkit.recipe.registry import PRESETS, names_of
    from optkit_cli.list import known
    from optkit_cli.messages import error_classes

    listed = (name for what in LISTED for name in known(what))
    errors = [each.__name__ for each in error_classes()]
    named = [*names_of("stage"), *names_of("eval"), *PRESETS, *listed]
    return [*named, *_metrics(), *errors, *map(str, EXIT_STATUSES), *_words()]


def _entry(name: str) -> Iterator[str]:
    from optkit.recipe.reference import entry, one_line
    from optkit.recipe.registry import PRESETS, names_of

    if name in PRESETS:
        yield f"{name} (preset): short for `- {one_line(PRESETS[name])}`"
        name = next(iter(PRESETS[name]))
    for role, names in (("stage", names_of("stage")), ("eval", names_of("eval"))):
        if name in names:
            yield f"{name} ({role})\n\n{plain(entry(role, name))}"


def _field(name: str) -> Iterator[str]:
    """Yield a page for each meaning of a field, and of the one that a message of a recipe begins with."""
    from optkit.recipe.reference import fields_called

    path = re.sub(r"^(error: )?(\S+:\d+:\d+: )?([\w.]+): .* is not .*", r"\3", name)
    for said, places in fields_called(path).items():
        inside = sorted({place.rpartition(".")[0] for place in places})
        there = f"In {', '.join(inside)}." if any(inside) else "A key of the recipe."
        yield "\n\n".join([f"{path.rpartition('.')[2]} (field)", _wrapped(there), plain(said), _with_field(places)])


def _with_field(places: Sequence[str]) -> str:
    """Return an example with a field that is at these places, of the first stage or eval that has one."""
    from optkit.recipe.registry import class_of

    written = ""
    for group, kind, *way in (place.split(".") for place in places if "." in place):
        example = class_of(group[:-1], kind).example
        if all(f"{name}:" in example for name in way):
            return textwrap.indent(f"{group}:\n{textwrap.indent(example, '  ')}", "    ")
        few = f"    {group}:\n      - {kind}: {{{way[0]}: VALUE}}" if len(way) == 1 else ""
        written = written or few or f"`optkit explain {kind}` has an example of {group}.{kind}."
    return written or f"    {places[0]}: VALUE"


def _metric(name: str) -> Iterator[str]:
    from optkit_evals.meanings import MEANINGS

    from optkit.recipe.gates import compares
    from optkit.recipe.registry import eval_class

    if name in (metrics := _metrics()):
        (unit, evals), meaning = metrics[name], MEANINGS.get(name)
        better = f"; {meaning.better} is better" if meaning and meaning.better else ""
        text = meaning.text if meaning else "Its eval says what it means."
        measured = f"Measured by {', '.join(evals)}: `optkit explain {evals[-1]}`."
        sign = ">=" if meaning and meaning.better == "higher" else "<="
        no_ratio = meaning.no_ratio if meaning else ""
        compared = "it compares with the baseline" if compares(name, eval_class(evals[0])) else no_ratio
        limit, how = ("LIMIT", compared) if compared else RELATIVE
        other = "" if better else " Write `>=` if more of it is better."
        gate = f'A gate: `{name}: "{sign} {limit}"` ({how}).{other}'
        yield "\n\n".join([f"{name} (metric): {unit}{better}", *map(_wrapped, (text, measured, gate))])


def _metrics() -> dict[str, tuple[str, list[str]]]:
    """Return metric -> its unit and the evals that measure it; a broken plug-in hides no others."""
    from optkit.recipe.registry import eval_class, names_of

    found: dict[str, tuple[str, list[str]]] = {}
    for kind in names_of("eval"):
        try:
            metrics = eval_class(kind).metrics
        except OptkitError:
            continue
        for metric, unit in metrics.items():
            found.setdefault(metric, (unit, []))[1].append(kind)
    return found


def _error(name: str) -> Iterator[str]:
    from optkit_cli.messages import error_classes, messages

    for each in error_classes():
        if name.lower() == each.__name__.lower():
            about = _wrapped(inspect.cleandoc(each.__doc__ or ""))
            count = sum(message.error == each.__name__ for message in messages())
            told = f"{count} messages: `optkit explain WORDS OF YOURS`." if count else ""
            yield "\n\n".join([f"{each.__name__} (error): exit status {each.exit_status}", about, told]).strip()
    if len(name) > 3 and " " in name:
        found = found_by(name)
        rest = len(found) - MOST_MESSAGES
        for message in found[:MOST_MESSAGES]:
            more = f"\n\n{rest} more have these words." if rest > 0 and message is found[MOST_MESSAGES - 1] else ""
            yield f"{message.error}: {message.what}\n\n{_wrapped(message.cure or 'It says all that is known.')}{more}"


def found_by(words: str) -> list[Message]:
    """Return the messages that have these words; else the one that the words hold as a whole, with values in the
    place of `‹name›`; of several the longest.
    """
    words, known = words.lower(), _pieces()
    if found := [each for each, pieces in known.items() if words in "…".join(pieces)]:
        return found
    lengths = {}
    for each, pieces in known.items():
        parts = [part for part in pieces if part.strip()]
        there = (length := len("".join(parts))) >= LEAST_LETTERS and all(part in words for part in parts)
        if there and re.search(".*".join(map(re.escape, parts)), words):
            lengths[each] = length
    return [each for each, length in lengths.items() if length == max(lengths.values())]


@cache
def _pieces() -> dict[Message, list[str]]:
    """Return what stands between the values of each message, in small letters."""
    from optkit_cli.messages import messages

    known = {each.text: each for each in reversed(messages())}
    return {each: re.split(r"‹.*?›|…", text.lower()) for text, each in known.items()}


def _status(name: str) -> Iterator[str]:
    if name.isdecimal() and int(name) in EXIT_STATUSES:
        yield f"{name} (exit status)\n\n{_wrapped(EXIT_STATUSES[int(name)])}"


def _word(name: str) -> Iterator[str]:
    words = {part.lower(): (word, text) for word, text in _words().items() for part in (word, *word.split(", "))}
    if name.lower() in words:
        word, text = words[name.lower()]
        yield f"{word}\n\n{_wrapped(text)}"


def _words() -> Mapping[str, str]:
    """Return the words of the glossary, without the links that follow their meanings."""
    from optkit.recipe.files import glossary

    found = re.findall(r"^\*\*(.+?)\*\*\{[^}]*\}\n:   (.+(?:\n    .+)*)", glossary(), re.MULTILINE)
    return {word: plain(" ".join(text.partition("See [")[0].split())) for word, text in found}


def _listed(name: str) -> Iterator[str]:
    """Yield what `optkit list` says of a data set, a model or a recipe."""
    from optkit_cli.list import known

    for what in LISTED:
        if name in (found := known(what)):
            yield f"{name} (one of `optkit list {what}`)\n\n{_wrapped(found[name])}"


READERS: tuple[Callable[[str], Iterator[str]], ...] = (_entry, _field, _metric, _error, _status, _word, _listed)


def plain(markdown: str) -> str:
    """Return Markdown as text for a terminal: examples indented, meanings below their words."""
    lines, fenced = list[str](), False
    for line in re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", markdown).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            lines.append(f"    {line}")
        elif line.startswith(":   "):
            lines.append(_wrapped(line[4:], "    "))
        else:
            lines.append(_wrapped(line.replace("\\", "")))
    return "\n".join(lines).strip()


def _wrapped(text: str, indent: str = "") -> str:
    paragraphs = text.split("\n\n")
    filled = (
        textwrap.fill(
            part, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for part in paragraphs
    )
    return "\n\n".join(filled)
