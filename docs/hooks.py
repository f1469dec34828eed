"""Reference pages, written from the code when the site is built."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from optkit.recipe.reference import recipes_page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    files.append(File.generated(config, "reference/recipe.md", content=recipes_page()))
    return files
