"""Linear layers with 2:4 sparse bfloat16 weights on one NVIDIA GPU, by torch's semi-structured
kernels, beside dense ones.

    python tests/benchmarks/sparse24_gpu.py [--out DIRECTORY]

Shapes of Llama-3-8B, random weights of which magnitude pruning keeps 2 of every 4. Each measurement
goes over copies of the weight that are larger than the L2 cache together, as the layers of a model
are. `eager`: one call after another, as a model in transformers runs them. `graph`: the same calls
in one CUDA graph, so that Python and launches cost nothing. CUDA events, median of 5; microseconds
a call. `worst`: the largest difference from the dense product in float32 of the same weights, as a
share of its largest value. Leaves sparse24.json and sparse24.md in the directory ($OUT, or here).
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from optkit.algorithms.pruning import kept_by_pattern
from optkit.algorithms.sparsity_pattern import Pattern

SHAPES = {"q_proj, o_proj": (4096, 4096), "gate_proj, up_proj": (14336, 4096), "down_proj": (4096, 14336)}
"""Layer of Llama-3-8B -> outputs, inputs."""
ROWS = (1, 16, 256, 4096)
WAYS = ("dense", "cuSPARSELt", "cuSPARSELt, searched", "CUTLASS")
"""`searched`: with the algorithm that cuSPARSELt's own search finds for the shape."""
LARGEST_DIFFERENCE = 0.02
"""bfloat16 has 8 bits of mantissa."""
COPIES_BYTES = 512 << 20
REPEATS = 5
CALLS = 20
"""Least calls of a repeat."""


def time_us(run: Callable[[], None], calls: int) -> float:
    """Return the median of the microseconds that one call takes on the GPU's clock; `run` makes all
    of them.
    """
    found = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) * 1000 / calls)
    return statistics.median(found)


def measure(inputs: Tensor, weights: Sequence[Tensor]) -> dict[str, Any]:
    """Return microseconds of a linear layer, eager and in a CUDA graph; why not, if it cannot be
    captured.
    """
    calls = max(CALLS, len(weights))

    def run() -> None:
        for call in range(calls):
            linear(inputs, weights[call % len(weights)])

    run()
    found: dict[str, Any] = {"eager_us": time_us(run, calls)}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        found["graph_us"] = time_us(graph.replay, calls)
    except RuntimeError as error:
        found["graph_error"] = str(error).splitlines()[0]
        torch.cuda.synchronize()
    return found


def pruned_weight(outputs: int, inputs: int) -> Tensor:
    """Return a random bfloat16 weight [out, in], 2 of every 4 inputs kept."""
    weight: Tensor = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    return weight * kept_by_pattern(weight.float().abs(), Pattern(2, 4))


def sparse(way: str, weight: Tensor, inputs: Tensor) -> Tensor:
    """Return a weight as torch's semi-structured tensor; raises RuntimeError if a backend is not
    built in or does not take it.
    """
    SparseSemiStructuredTensor._FORCE_CUTLASS = way == "CUTLASS"
    made: Any = to_sparse_semi_structured(weight)
    if way == "cuSPARSELt, searched":
        made.alg_id_cusparselt = torch._cslt_sparse_mm_search(made.packed, inputs.T)
    return made  # type: ignore[no-any-return]


def measure_shape(layer: str, outputs: int, inputs: int) -> list[dict[str, Any]]:
    """Return a record for each number of rows and each way."""
    dense = [pruned_weight(outputs, inputs) for _ in range(max(1, COPIES_BYTES // (2 * outputs * inputs)))]
    records = []
    for rows in ROWS:
        given = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        exact = given.float() @ dense[0].float().T
        for way in WAYS:
            record: dict[str, Any] = {"layer": layer, "outputs": outputs, "inputs": inputs, "rows": rows, "way": way}
            records.append(record)
            try:
                padded = torch.cat([given] * -(-ROWS[1] // rows)) if rows < ROWS[1] else given
                weights = dense if way == "dense" else [sparse(way, weight, padded) for weight in dense]
                record |= measure(given, weights)
                record["worst"] = float((linear(given, weights[0]).float() - exact).abs().max() / exact.abs().max())
                record["weight_bytes"] = stored_bytes(weights[0])
            except (RuntimeError, NotImplementedError) as error:
                record["error"] = str(error).splitlines()[0]
                torch.cuda.synchronize()
    return records


def stored_bytes(weight: Any) -> int:
    """Return the bytes that a weight takes."""
    parts = [getattr(weight, name, None) for name in ("packed", "meta")]
    return sum(part.nbytes for part in parts if part is not None) or int(weight.nbytes)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as Markdown: microseconds and, in brackets, how many times as fast as
    dense.
    """
    lines = ["| layer | weights | rows | how | " + " | ".join(WAYS) + " |", "|---" * (4 + len(WAYS)) + "|"]
    for dense in (record for record in records if record["way"] == "dense"):
        same = {
            record["way"]: record
            for record in records
            if (record["layer"], record["rows"]) == (dense["layer"], dense["rows"])
        }
        for how in ("eager_us", "graph_us"):
            cells = []
            for way in WAYS:
                found, usual = same[way].get(how), dense.get(how)
                gain = f" ({usual / found:.2f}x)" if found and usual and way != "dense" else ""
                cells.append(f"{found:.1f}{gain}" if found else "-")
            first = (
                f"| {dense['layer']} | {dense['outputs']} x {dense['inputs']} | {dense['rows']} | "
                f"{how.removesuffix('_us')} | "
            )
            lines.append(first + " | ".join(cells) + " |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    """Measure all shapes, print the table, write both forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    records = [
        record for layer, (outputs, inputs) in SHAPES.items() for record in measure_shape(layer, outputs, inputs)
    ]
    environment = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    (out / "sparse24.json").write_text(json.dumps({**environment, "records": records}, indent=1), encoding="utf-8")
    wrong = [record for record in records if record.get("worst", 0) > LARGEST_DIFFERENCE]
    refused = sorted(
        {f"{record['way']}, {record['rows']} rows: {record['error']}" for record in records if "error" in record}
    )
    sizes = {
        record["way"]: record["weight_bytes"] / record["outputs"] / record["inputs"]
        for record in records
        if "weight_bytes" in record
    }
    text = [
        ", ".join(f"{name} {value}" for name, value in environment.items()),
        table(records),
        "Bytes a weight: " + ", ".join(f"{way} {size:.3f}" for way, size in sizes.items()),
        f"Largest difference from float32: {max((record.get('worst', 0) for record in records), default=0):.4f}",
        *refused,
        *(f"WRONG: {record}" for record in wrong),
    ]
    (out / "sparse24.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    print("\n\n".join(text))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
