"""Answer one request about one engine, in the Python that has the engine.

python worker.py MODULE REQUEST.json ANSWER.json

MODULE, a file beside this one, has PACKAGES (whose versions are told), `missing(request, versions)`
(what is not installed) and `answer_to(request)`. The answer is there whole or not at all. stdin
stays open for as long as the parent lives.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from importlib import import_module, metadata
from pathlib import Path
from typing import Any


def versions_of(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def end_with_parent() -> None:
    """Leave the engine an empty stdin, and end this process and its children when the parent's end
    of the real one is gone.
    """
    parent = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_wait_for_end, args=(parent,), daemon=True).start()


def _wait_for_end(parent: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(parent, 4096):
            pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(module: str, question: Path, answer: Path) -> None:
    """Write what the engine makes of the request, what it lacks, or the first words of its refusal."""
    engine = import_module(module)
    request = json.loads(question.read_text(encoding="utf-8"))
    versions = versions_of(engine.PACKAGES)
    said: dict[str, Any] = {"versions": {**versions, "python": sys.version.split()[0]}}
    missing = engine.missing(request, versions)
    if missing:
        said["missing"] = missing
    else:
        try:
            said.update(engine.answer_to(request))
        except Exception as error:
            said["refused"] = f"{type(error).__name__}: {error}"
    draft = answer.with_suffix(".draft")
    draft.write_text(json.dumps(said), encoding="utf-8")
    draft.replace(answer)


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
