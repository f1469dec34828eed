"""A push on the terminal: what goes where before it leaves, then what is known of it there."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from optkit.publishing.push import Push
from optkit_cli.tables import indented, plain_table, size_text


def files_view(push: Push) -> list[RenderableType]:
    """Return each file with its bytes and digest."""
    rows = [(file.name, f"{file.size_bytes:,}", file.sha256[:16]) for file in push.files]
    total = sum(file.size_bytes for file in push.files)
    closing = f"{len(push.files)} files, {size_text(total)}, from {push.shipment.artifact.directory}"
    return [
        Text(f"{push.target}  {push.target.place}"),
        plain_table("file", ">bytes", "sha256", rows=rows),
        Text(closing),
    ]


def result_view(push: Push, known: dict[str, str] | None) -> list[RenderableType]:
    """Return what is known of the files at the target; None for a dry run."""
    if known is None:
        return [Text("dry run: nothing was uploaded")]
    found = indented(list(known.items()))
    return [Text(f"pushed to {push.target}"), *([found] if found else [])]


def push_document(push: Push, known: dict[str, str] | None) -> dict[str, Any]:
    """Return the same as JSON; `result` is None for a dry run."""
    return {
        "target": str(push.target),
        "place": push.target.place,
        "artifact": str(push.shipment.artifact.directory),
        "files": [{"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in push.files],
        "warnings": list(push.warnings),
        "result": known,
    }
