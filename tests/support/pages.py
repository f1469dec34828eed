"""Pages of the documentation: their code blocks, the commands in those, and their anchors.

A comment in front of a block says how it is checked: `<!-- not run: it takes minutes -->` is for
what has to be well-formed and is not executed.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\s*\n\s*)?"
    r"^(?P<indent>[ ]*)```(?P<language>[\w+#-]*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
SNIPPET = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)
"""A file that the site shows in its place."""
SHELLS = {"console", "bash", "sh", "shell"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    """The file that it is, as `title="recipe.yaml"` behind the language says; empty without."""
    text: str
    executed: bool
    """False if a comment in front of it says `not run`."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page, of these languages or all."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            title[1] if (title := re.search(r'title="([^"]*)"', match["rest"])) else "",
            SNIPPET.sub(lambda said: (ROOT / said[1]).read_text(encoding="utf-8"), dedent(match["text"])),
            not (match["mark"] or "").startswith("not run"),
        )
        for match in FENCE.finditer(text)
        if not languages or match["language"] in languages
    ]


def shell_lines(block: Block) -> list[str]:
    """Return what is typed: all lines of a script; of a console those behind `$`."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    if block.language == "console":
        return [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell line, without redirections and variables in front."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    skipped = False
    for word in [*lexer, ";"]:
        if word in {"<", ">", ">>", ">&"}:
            skipped = True
        elif re.fullmatch(r"[|&;()]+", word):
            if words:
                yield words
            words = []
        elif skipped:
            skipped = False
        elif words or not re.match(r"\w+=|(if|then|else|fi|do|done|while|exec|time)$", word):
            words.append(word)


def scripts(document: Any) -> Iterator[str]:
    """Yield the shell scripts of a pipeline: GitHub's `run`, GitLab's `script`."""
    match document:
        case dict():
            for key, value in document.items():
                if key in {"run", "script"} and isinstance(value, str | list):
                    yield value if isinstance(value, str) else "\n".join(value)
                else:
                    yield from scripts(value)
        case list():
            for value in document:
                yield from scripts(value)


def yaml_of(block: Block) -> Any:
    """Return the data of a YAML block."""
    return YAML(typ="safe").load(block.text)


def optkit_commands(page: Path) -> list[list[str]]:
    """Return the words of every optkit command of a page's blocks and pipelines."""
    typed = [line for block in blocks(page, *SHELLS) for line in shell_lines(block)]
    for block in blocks(page, "yaml"):
        typed += [line for script in scripts(yaml_of(block)) for line in script.splitlines()]
    for block in blocks(page, "python"):
        texts = [node.value for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Constant)]
        typed += [line for text in texts for line in str(text).splitlines() if line.startswith("optkit ")]
    return [words for line in typed for words in commands(line) if words[0] == "optkit"]


def mentioned_commands(page: Path) -> list[list[str]]:
    """Return the words of every optkit command in a page's sentences and tables."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    said = (" ".join(each.split()) for each in re.findall(r"`(optkit [a-z][^`]*)`", prose))
    return [words for line in said for words in commands(line.replace("\\|", "|"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*?)(?: *\{ *#([\w-]+) *\})?$", text, re.MULTILINE)
    return {given or re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading, given in headings}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the anchor of each link that stays in the repository."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor
