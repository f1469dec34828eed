"""A stage that runs others in the processes that it was started in; a module of its own, because they
import it.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from optkit.common.frozen import restored
from optkit.stage import Context, Report, Transform


class Runs(Transform):
    """Run stages on models, each into a directory of its own; perhaps be killed on the way."""

    runs: dict[str, tuple[str, dict[str, Any]]]
    """Name -> model directory and stage, as `described` says it."""
    killed: tuple[int, int] | None = None
    """The process that ends behind so many kept blocks."""
    exact: bool = False
    """Sum and round in float64, where the order of sums changes no code."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        import torch

        torch.use_deterministic_algorithms(True)
        if self.exact:
            _in_float64()
        if self.killed and int(os.environ["RANK"]) == self.killed[0]:
            _end_behind(self.killed[1])
        found = {}
        for name, (model, stage) in self.runs.items():
            (target / name).mkdir(exist_ok=True)
            workspace = context.workspace and context.workspace / name
            report = restored(stage).run(Path(model), target / name, replace(context, workspace=workspace))
            found[name] = {"details": dict(report.details), "notes": list(report.notes)}
        return Report(changed=1, details=found)


def _end_behind(blocks: int) -> None:
    from optkit.model.kept_blocks import KeptBlocks

    keep, count = KeptBlocks._keep, [0]

    def kept(self: KeptBlocks, *arguments: Any) -> None:
        count[0] += 1
        if count[0] > blocks:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, *arguments)

    KeptBlocks._keep = kept  # type: ignore[method-assign]


def _in_float64() -> None:
    from contextlib import nullcontext

    from optkit.algorithms import hessian
    from optkit.stages.quantizing import compensation, hessians

    factors, float_weight, start = hessian.float_factors, compensation.float_weight, hessian.Hessian.__init__

    def begin(self: hessian.Hessian, *arguments: Any, **fields: Any) -> None:
        start(self, *arguments, **{**fields, "rounded": False})
        self._sum = self._sum.double()

    hessian.Hessian.__init__ = begin  # type: ignore[method-assign]
    hessian.float_factors = lambda rows, equal: [(each.double(), each.double()) for each, _ in factors(rows, equal)]
    compensation.float_weight = lambda module: float_weight(module).double()
    hessians.in_bfloat16 = lambda layers: nullcontext()
