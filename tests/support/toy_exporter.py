"""The process that exports, with the code in $TOY_EXPORTER in the place of the export; it sees
`order`.
"""

import os
from typing import Any

from optkit.onnx import build_worker
from optkit.processes.child_program import Parent


def _export(order: dict[str, Any]) -> None:
    exec(os.environ["TOY_EXPORTER"], {"order": order})


def work(parent: Parent) -> None:
    build_worker._export = _export
    build_worker.work(parent)
