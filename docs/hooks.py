"""What building the site adds: reference pages from the code, and tooltips from the glossary."""

from __future__ import annotations

import re
from functools import cache
from html import escape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from optkit_cli.explain import plain
from optkit_cli.reference import reference_pages

from docs.models_page import zoo_table
from optkit.recipe.files import glossary

SOUGHT = {"errors": "---\nsearch: {boost: 60}\n---\n\n"}
"""Front matter of a page whose sections are so long that a search for their words finds others first."""
NO_PROSE = re.compile(r"(<(a|code|h\d|pre|svg|th)\b.*?</\2>|<[^>]+>)", re.DOTALL)
"""Tags, and elements whose words get no tooltip."""
PLACE = "<!-- zoo -->"
"""Place of the table of the zoo."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    for name, text in reference_pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=SOUGHT.get(name, "") + text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table of the zoo in its place."""
    return markdown.replace(PLACE, zoo_table()) if PLACE in markdown else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give the words of the glossary a tooltip, each at its first place on a page."""
    if page.file.src_uri == "glossary.md":
        return html
    left = dict(meanings())

    def explained(found: re.Match[str]) -> str:
        meaning = left.get(found["word"])
        for word in [word for word, each in left.items() if each == meaning]:
            del left[word]
        return f'<abbr title="{escape(meaning)}">{found[0]}</abbr>' if meaning else found[0]

    words = re.compile(rf"\b(?P<word>{'|'.join(sorted(left, key=len, reverse=True))})s?\b")
    # Every third part, from the first, is text; the others are what stands between, and the name of its tag.
    parts = NO_PROSE.split(html)
    parts[::3] = [words.sub(explained, text) for text in parts[::3]]
    del parts[2::3]
    return "".join(parts)


@cache
def meanings() -> dict[str, str]:
    """Return the words of the glossary and what they mean, but those that are everyday words too."""
    found = re.findall(r"^\*\*(.+?)\*\*\{ #\S+ \}\n:   (.+(?:\n    .+)*)", glossary(), re.MULTILINE)
    meant = {words: plain(re.sub(r"\s+See\s\[.*", "", text, flags=re.DOTALL)) for words, text in found}
    return {word: " ".join(text.split()) for words, text in meant.items() for word in words.split(", ")}
