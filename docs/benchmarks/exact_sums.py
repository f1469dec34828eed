"""What tensor cores cost: `gptq` as it is, and with all its sums in float64, as a Markdown table.

    python docs/benchmarks/exact_sums.py MODEL DATA [--device DEVICE] [--samples 57,58,59,60,61,62,63,64]

A code that rounds the other way moves all behind it, so one text says little: each number of samples makes a
pair of rows, and the last line has the mean difference of the pairs with its 95% interval. In float64 are the
Hessians, their factors, what is carried from column to column, and scales. The model computes in bfloat16, for
which tensor cores sum Hessians. 4 bits, symmetric groups of 64, calibrated on so many times 512 tokens of C4;
perplexity and KL on the first 15 windows of 2048 tokens of WikiText-2's test split.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from optkit_evals.divergence import Divergence
from optkit_evals.perplexity import Perplexity
from torch import Tensor

from optkit.algorithms import column_kernels, refinement
from optkit.algorithms import gptq as algorithm
from optkit.algorithms.hessian import Hessian
from optkit.common.statistics import mean, standard_error, t_quantile
from optkit.measure import EvalContext
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.cast import Cast
from optkit.stages.gptq import Gptq

WINDOWS: dict[str, Any] = {"dataset": "wikitext2", "split": "test", "window": 2048, "windows": 15}


@contextmanager
def in_float64() -> Iterator[None]:
    """Let GPTQ compute in float64, by its loops in torch. Kernels take float32 alone."""
    begin, prepared, rounded = Hessian.__init__, algorithm._prepared, algorithm._rounded
    usable = column_kernels.usable

    def begun(self: Hessian, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self._sum = self._sum.double()

    def added(self: Hessian, inputs: Tensor, sizes: Tensor | None = None) -> None:
        rows = inputs.flatten(0, -2).double()
        self.tokens += len(rows)
        squares = rows.square().mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        divisor = squares if sizes is None and self.equal_tokens else sizes
        self._sum += rows.T @ (rows if divisor is None else rows / divisor)

    def doubled(weight: Tensor, hessian: Tensor, *others: Any) -> Any:
        return prepared(weight.double(), hessian, *others)

    def narrowed(weight: Tensor, *others: Any) -> Any:
        return tuple(each.float() for each in rounded(weight.double(), *others))

    def product(left: Tensor, right: Tensor) -> Tensor:
        return left.double() @ right.double()

    with ExitStack() as stack:
        for place, name, value in (
            (Hessian, "__init__", begun),
            (Hessian, "add", added),
            (algorithm, "_prepared", doubled),
            (algorithm, "_rounded", narrowed),
            (algorithm, "product", product),
            (refinement, "product", product),
            (column_kernels, "usable", lambda tensor: tensor.dtype == torch.float32 and usable(tensor)),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"as it is": nullcontext, "float64": in_float64}


def main() -> None:
    """Print a line as each is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", default="57,58,59,60,61,62,63,64")
    asked = parser.parse_args()
    print("| sums | samples | perplexity | KL | time |\n" + "|---" * 5 + "|", flush=True)
    evals = Perplexity(**WINDOWS), Divergence(**WINDOWS)
    differences: list[list[float]] = []
    with tempfile.TemporaryDirectory() as directory:
        model, target = Path(directory) / "bfloat16", Path(directory) / "made"
        model.mkdir()
        Cast(dtype="bfloat16").run(asked.model, model, Context("cpu"))
        unmodified: Any = open_session(model, (), asked.device)
        context = EvalContext(data=asked.data, baseline=unmodified)
        for samples in map(int, asked.samples.split(",")):
            text = Calibration(dataset="c4", samples=samples, sequence_length=512)
            pair: list[list[float]] = []
            for name, way in WAYS.items():
                place = target / f"{name} {samples}"
                place.mkdir(parents=True)
                began = time.perf_counter()
                with way():
                    Gptq(group_size=64, calibration=text).run(model, place, Context(asked.device, data=asked.data))
                spent = time.perf_counter() - began
                session: Any = open_session(place, (), asked.device)
                numbers = {metric.name: metric.value for each in evals for metric in each.run(session, context)}
                pair.append([numbers["perplexity"], numbers["kl_divergence"]])
                print(f"| {name} | {samples} | {pair[-1][0]:.4f} | {pair[-1][1]:.5f} | {spent:.0f} s |", flush=True)
            differences.append([100 * (now / exact - 1) for now, exact in zip(*pair, strict=True)])
    print(f"| difference, % | all | {' | '.join(_mean(list(each)) for each in zip(*differences, strict=True))} | |")


def _mean(values: list[float]) -> str:
    """Return a mean with its 95% interval, if there are several."""
    half = t_quantile(len(values) - 1) * standard_error(values) if len(values) > 1 else 0
    return f"{mean(values):+.3f} +- {half:.3f}"


if __name__ == "__main__":
    main()
