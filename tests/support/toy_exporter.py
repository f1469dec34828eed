"""The process that exports, with the code in $TOY_EXPORTER in the place of the export; it sees
`order`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from optkit.onnx import build_worker


def _export(order: dict[str, Any]) -> None:
    exec(os.environ["TOY_EXPORTER"], {"order": order})


if __name__ == "__main__":
    build_worker._export = _export
    sys.exit(build_worker.main(int(sys.argv[1])))
