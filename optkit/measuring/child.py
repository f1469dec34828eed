"""What `measuring_process` starts: open one model, measure it, tell the results.

python -m optkit.measuring.child FILE_DESCRIPTOR < ORDER
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from optkit.environment import describe_environment
from optkit.errors import OptkitError
from optkit.measure import EvalContext, Turn
from optkit.measuring.parent import restored, told_error
from optkit.processes.crashes import told_crash
from optkit.processes.start import end_with_parent


class Channel:
    """Lines of JSON to the process that waits; a `Progress`."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._lock, self._tasks = file, threading.Lock(), 0

    def tell(self, type: str, **message: Any) -> None:
        """Write one message."""
        with self._lock:
            self._file.write(json.dumps({"type": type, **message}) + "\n")
            self._file.flush()

    def task(self, label: str, total: int, unit: str = "") -> ToldTask:
        """Open a bar over there."""
        self._tasks += 1
        self.tell("task", id=self._tasks, label=label, total=total, unit=unit)
        return ToldTask(self, self._tasks)

    def say(self, line: str) -> None:
        """Print a line over there."""
        self.tell("say", line=line)

    def warn(self, line: str) -> None:
        """Print a warning over there."""
        self.tell("warn", line=line)


class ToldTask:
    """A bar of the process that waits."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = channel, number

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.tell("done", id=self._number)

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count steps over there."""
        self._channel.tell("advance", id=self._number, steps=steps, note=note)


def run(order: Mapping[str, Any], channel: Channel) -> list[dict[str, Any]]:
    """Open the model of an order, run its evals one after another, and return what each measured as
    JSON values.
    """
    from optkit.session import open_session

    if order["threads"] is not None:
        import torch

        torch.set_num_threads(order["threads"])
    settings = [restored(each) for each in order["settings"]]
    trusted = order["trust_remote_code"]
    session = open_session(
        Path(order["directory"]), settings, device=order["device"], progress=channel, trust_remote_code=trusted
    )
    found = []
    try:
        for each in map(restored, order["evals"]):
            context = EvalContext(
                seed=order["seed"],
                progress=channel,
                data=None if order["data"] is None else Path(order["data"]),
                calibrated_on=tuple(order["calibrated_on"]),
                turn=Turn(order["turn"], each.turns()),
            )
            metrics = each.run(session, context)
            found.append(
                {
                    "metrics": [metric.model_dump(mode="json") for metric in metrics],
                    "notes": context.notes,
                    "session_notes": list(session.notes),
                    "environment": describe_environment(order["device"]),
                }
            )
    finally:
        session.close()
    return found


def main() -> None:
    """Read the order, answer it, and end; at once where the process that waits is gone."""
    with open(int(sys.argv[1]), "w", encoding="utf-8") as file:  # noqa: PTH123
        channel = Channel(file)
        with open(0, "rb", buffering=0, closefd=False) as orders:
            order = json.loads(orders.readline())
        end_with_parent()
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            try:
                channel.tell("answer", evals=run(order, channel))
            except OptkitError as error:
                channel.tell("error", **told_error(error))
            except Exception as error:
                channel.tell("crash", **told_crash(error))


if __name__ == "__main__":
    main()
