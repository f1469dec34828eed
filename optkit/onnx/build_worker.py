"""Entry of the process that exports: `python -P -m optkit.onnx.build_worker DESCRIPTOR`, in the
environment of optkit itself.

In: one JSON line on stdin (the fields of `optkit.onnx.builder.Order`); stdin stays open for as long
as the parent lives.
Out: JSON lines on the file descriptor; stdout and stderr belong to the libraries.

    {"type": "read", "what": "layer 3"}                    the exporter is at this part of the model
    {"type": "done"}                                       the last line of a process that is done
    {"type": "refused", "kind": "StageError", "what": ...}  an error of optkit's own, in its parts
    {"type": "error", "exception": "ValueError", "message": "first line", "disk_full": false, "no_memory": false,
     "trace": ...}
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from optkit.common.limits import NO_ROOM, errno_of, is_out_of_memory
from optkit.errors import OptkitError
from optkit.processes.crashes import told_crash
from optkit.processes.start import end_with_parent

READING = re.compile(r"Reading (layer \d+|embedding layer|final norm|LM head)")


class Told:
    """The parent, on the other end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._messages = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Write one line."""
        self._messages.write(json.dumps(message) + "\n")


class Overheard:
    """Standard output that passes on at which part of the model the builder is."""

    def __init__(self, output: TextIO, parent: Told) -> None:
        self._output, self._parent = output, parent

    def write(self, text: str) -> int:
        """Write text on, and tell the parent where it names a part."""
        for what in READING.findall(text):
            self._parent.send(type="read", what=what)
        return self._output.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def main(descriptor: int) -> int:
    """Do the work and return the exit status."""
    parent = Told(descriptor)
    order = json.loads(_first_line())
    end_with_parent()
    try:
        sys.stdout = Overheard(sys.stdout, parent)  # type: ignore[assignment]
        _export(order)
    except OptkitError as error:
        parent.send(
            type="refused",
            kind=type(error).__name__,
            what=error.what,
            where=error.where,
            why=error.why,
            remedy=error.remedy,
        )
        return 1
    except BaseException as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = next(
            iter(str(error).strip().splitlines()), f"{last.line} ({Path(last.filename).name}, line {last.lineno})"
        )
        full = errno_of(error) in NO_ROOM
        told = {"trace": told_crash(error)["trace"], "no_memory": is_out_of_memory(error)}
        parent.send(type="error", exception=type(error).__name__, message=message, disk_full=full, **told)
        return 1
    parent.send(type="done")
    return 0


def _export(order: dict[str, Any]) -> None:
    if order["exporter"] == "torch":
        from optkit.onnx.torch_decoder import export_decoder

        export_decoder(
            Path(order["source"]), Path(order["target"]), order["opset"], order["kv_cache"], order["trust_remote_code"]
        )
        return
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


def _first_line() -> bytes:
    """Return the first line of stdin, read without a buffer that the watching thread would miss."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            sys.exit("the parent went before it had said what to do")
        line += part
    return line


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
