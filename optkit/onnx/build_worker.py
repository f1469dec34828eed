"""What the process that exports does with an order (see `builder._request`).
It runs in the environment of optkit itself.

It tells at which part of the model the exporter is: `{"type": "read", "part": "layer 3"}`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, TextIO

from optkit.processes.child_program import Parent, importing

READING = re.compile(r"Reading (layer \d+|embedding layer|final norm|LM head)")


class WatchedOutput:
    """Standard output that passes on at which part of the model the builder is."""

    def __init__(self, output: TextIO, parent: Parent) -> None:
        self._output, self._parent = output, parent

    def write(self, text: str) -> int:
        """Write text on, and tell the parent which parts it names."""
        for part in READING.findall(text):
            self._parent.tell("read", part=part)
        return self._output.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def work(parent: Parent) -> None:
    """Fill the target of the order with what its exporter makes."""
    order = parent.order()
    sys.stdout = WatchedOutput(sys.stdout, parent)  # type: ignore[assignment]
    _export(order)


def _export(order: dict[str, Any]) -> None:
    if order["exporter"] == "torch":
        with importing():
            from optkit.onnx.torch_decoder import export_decoder

        export_decoder(
            Path(order["source"]), Path(order["target"]), order["opset"], order["kv_cache"], order["trust_remote_code"]
        )
        return
    with importing():
        from onnxruntime_genai.models import builder

        from optkit.onnx.adapted_builder import adapt_

    adapt_(builder, order)
    builder.create_model(
        "",
        order["view"],
        order["target"],
        order["precision"],
        order["provider"],
        order["cache"],
        hf_remote=order["trust_remote_code"],
        hf_token="false",
        **order["options"],
    )
