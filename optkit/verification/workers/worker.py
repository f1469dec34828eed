"""Answer one request about one engine, in the Python that has the engine.
`optkit/processes/child_program.py` runs this file.

The request names a worker, the path of a file, with PACKAGES (whose versions are told),
`missing(request, versions)` (what is not installed) and `answer_to(request)`.
"""

import sys
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


def work(parent: Any) -> dict[str, Any]:
    """Tell the versions, then return what the engine makes of the request, or what it lacks."""
    request = parent.order()
    worker = Path(request["worker"])
    sys.path.insert(0, str(worker.parent))
    engine = import_module(worker.stem)
    versions = versions_of(engine.PACKAGES)
    parent.tell("versions", python=sys.version.split()[0], **versions)
    missing = engine.missing(request, versions)
    return {"missing": missing} if missing else engine.answer_to(request)
