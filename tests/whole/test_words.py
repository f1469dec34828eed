"""Words are those of docs/style.md: short sentences, plain words, pages that are read in one go."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from optkit_cli.messages import messages
from optkit_cli.reference import reference_pages

ROOT = Path(__file__).parents[2]
SENTENCE, LINE, CELL, PAGE = 25, 100, 120, 1200
"""Words of a sentence, characters of a line and of a table's cell, words of a page."""
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))}
BANNED = (
    "the times stood still",
    "what was lost",
    "taught back",
    "gone on with",
    "in front of which",
    "is here to",
    "simply",
    "leverage",
    "utilize",
    "seamless",
)
CONDITION = re.compile(
    r"\bwhere (?:there (?:is|are|was|were)|none|no|nothing|enough|possible|needed|necessary|available|that is)\b"
)
"""What "if" is for; "where" is for places."""


def prose(text: str) -> Iterator[str]:
    """Return the paragraphs and list items of a page: no code, tables, keys of figures or headings."""
    text = re.sub(r"^```.*?^```|^(\||\*\d)[^\n]*|^---\n.*?\n---|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "X", re.sub(r"\]\([^)]*\)", "]", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.|:) |^#.*$|^:::.*$", text, flags=re.MULTILINE):
        yield " ".join(paragraph.split())


def long_sentences(text: str) -> list[str]:
    return [
        sentence
        for paragraph in prose(text)
        for sentence in re.split(r"(?<!e\.g)(?<!i\.e)[.;:!?]\)?\s+", paragraph)
        if len(sentence.split()) > SENTENCE
    ]


def banned(text: str) -> list[str]:
    return [words for words in BANNED if words in text.lower()] + CONDITION.findall(text)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_read_in_one_go(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert long_sentences(text) == []
    assert name == "docs/style.md" or banned(text) == []
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    shown = [re.sub(r"\]\([^)]*\)", "]", line) for line in outside]
    assert [line for line in shown if len(line) > LINE and not line.startswith("|")] == []
    assert [cell for line in shown for cell in line.split("|") if line.startswith("|") and len(cell) > CELL] == []
    assert name == "CHANGELOG.md" or len(re.findall(r"\S*\w\S*", text)) <= PAGE


def test_generated_pages_have_short_sentences() -> None:
    for name, text in reference_pages().items():
        assert (name, long_sentences(text), banned(text)) == (name, [], [])


def test_messages_are_short() -> None:
    said = [part for message in messages() for part in (message.what, message.why, message.remedy)]
    assert [each for part in said for each in (*long_sentences(part), *banned(part))] == []
