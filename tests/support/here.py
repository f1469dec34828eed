"""Work of child processes, done in this one: Python, torch and transformers are not imported anew."""

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from optkit.onnx.quiet import quiet_tools
from optkit.processes.child import Bars, Child
from optkit.processes.child_program import Parent, described
from optkit.processes.crashes import error_of
from optkit.progress import Progress, SilentProgress

CHANGED = ("builders", "onnxruntime_genai.models", "open_in_")
"""Modules that each child imports anew: workers of engines, and what an export changes."""


class Here:
    """In the place of a `Child` of our own Python: orders and answers are the same JSON."""

    def __init__(self, target: str | Path, *, name: str, **_: object) -> None:
        self.name, self._orders = name, list[str]()
        whole = str(target)
        self._work = runpy.run_path(whole)["work"] if whole.endswith(".py") else import_module(whole).work

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def send(self, order: Mapping[str, Any]) -> None:
        self._orders.append(json.dumps(order))

    def result(
        self,
        progress: Progress | None = None,
        others: Mapping[str, Callable[..., object]] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        with Bars(progress or SilentProgress()) as bars, quiet_tools(), _imports_of_its_own():
            try:
                return json.loads(json.dumps(self._work(_Listening(self._orders, bars, others or {}))))
            except Exception as error:
                raise error_of(described(error), self.name) from None


def child_of(target: str | Path, *, name: str, python: Sequence[str] = (), **how: Any) -> Here | Child:
    """Return a `Here`, or a child if it is to run in another Python."""
    if list(python) in ([], [sys.executable]):
        return Here(target, name=name)
    return Child(target, name=name, python=python, **how)


class _Listening(Parent):
    """What such work sees of its parent."""

    def __init__(self, orders: list[str], bars: Bars, others: Mapping[str, Callable[..., object]]) -> None:
        super().__init__(io.StringIO())
        self._given, self._bars, self._others = orders, bars, others

    def order(self) -> dict[str, Any]:
        order: dict[str, Any] = json.loads(self._given.pop(0))
        return order

    def tell(self, type: str, **message: Any) -> None:
        if type in self._others:
            self._others[type](**message)
        else:
            self._bars.draw(type, message)


@contextlib.contextmanager
def _imports_of_its_own() -> Iterator[None]:
    path, before = sys.path[:], {name: module for name, module in sys.modules.items() if name.startswith(CHANGED)}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(CHANGED)]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:] = path
