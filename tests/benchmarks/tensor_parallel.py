"""Llama-3-8B's shape in bfloat16 (random weights) on one GPU, on two by `tensor_parallel`, and on
one with half of its layers offloaded.

    python tests/benchmarks/tensor_parallel.py [--only PATTERN] [--weights 'int4, groups of 128'] \
        [--cells 1x128,32x128] [--model DIRECTORY] [--work DIRECTORY] [--out DIRECTORY] [--limit-s 170]

Prefill of 8 x 512 tokens, decoding of 1 and 32 sequences behind 128 tokens (--cells): greedy, 16 new tokens
(128 by `cuda_graphs`, 4 if weights are offloaded), the median of 3 repeats after a warm-up, by the clocks of the eval
`throughput`. The logits of 2 x 64 tokens are compared with those of one
GPU: the norm of the difference over that of the logits; 8 layers in float32 say whether they are
the same. tensor_parallel.json and
tensor_parallel.md in --out ($OUT) are written after each way, so that a limit of time leaves what
was measured. `--only '*cuda_graphs'` measures the graphs, which are left out without --only.
"""

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from decode_gpu import WEIGHTS, random_model
from optkit_evals.timing import answer, random_tokens
from torch import Tensor

from optkit.common.byte_sizes import size_text
from optkit.devices.peak_memory import peak_of
from optkit.environment import describe_environment
from optkit.session import open_session
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.offload import Offload
from optkit.settings.precision import Precision
from optkit.settings.tensor_parallel import TensorParallel
from optkit.stage import Context, Setting

UPPER_HALF = ("model.layers.1[6-9]", "model.layers.2?", "model.layers.3?")
WAYS: dict[str, Sequence[Setting]] = {
    "one GPU": (),
    "two GPUs": (TensorParallel(devices=2),),
    "half of the layers in main memory": (Offload(device_map=dict.fromkeys(UPPER_HALF, "cpu")),),
    "two layers on disk": (Offload(device_map={"model.layers.3?": "disk"}),),
    "one GPU, cuda_graphs": (CudaGraphs(),),
    "two GPUs, cuda_graphs": (TensorParallel(devices=2), CudaGraphs()),
    "four GPUs, cuda_graphs": (TensorParallel(devices=4), CudaGraphs()),
}
NEW_TOKENS, FEW_TOKENS, MANY_TOKENS, REPEATS = 16, 4, 128, 3
EXACT_LAYERS, MOST_ERROR = 8, 1e-4
"""What is exact is seen in float32, on so many layers: in bfloat16 the order of sums alone moves
random weights' logits by percents.
"""


def main() -> None:
    """Make the model, measure each way, write a row for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/tensor_parallel"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--weights", choices=WEIGHTS, default="bfloat16", help="what the model is made into first")
    parser.add_argument("--only", default="")
    parser.add_argument("--cells", default="8x512,1x128,32x128", help="batch x prompt")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--limit-s", type=float, default=170.0, help="no further way or batch begins after so many seconds"
    )
    given = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in given.cells.split(",")]
    begin = time.monotonic()
    given.work.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    model = given.model or random_model(given.work / "model")
    if (stage := WEIGHTS[given.weights]) and not (packed := given.work / given.weights).exists():
        packed.mkdir()
        stage.run(model, packed, Context(device=given.device))
    model = given.work / given.weights if stage else model
    record: dict[str, Any] = {
        "environment": describe_environment(given.device),
        "made_s": round(time.monotonic() - begin, 1),
        "ways": {},
    }
    logits_file = given.work / f"logits of {given.weights}.pt"
    if not given.only:
        record["float32_error"] = _float32_error(given.work / "exact", given.device)
    for way, settings in WAYS.items():
        if not (fnmatch(way, given.only) if given.only else CudaGraphs not in map(type, settings)):
            continue
        if time.monotonic() - begin > given.limit_s:
            record["ways"][way] = {"failure": f"left out: {given.limit_s:g} s were over"}
            continue
        record["ways"][way] = _measured(way, model, settings, given.device, logits_file, cells, begin + given.limit_s)
        record["seconds"] = round(time.monotonic() - begin, 1)
        (given.out / "tensor_parallel.json").write_text(json.dumps(record, indent=1))
        (given.out / "tensor_parallel.md").write_text("\n".join(_markdown(record)) + "\n")
    print("\n".join(_markdown(record)))


def _float32_error(place: Path, device: str) -> float:
    """Return how far the logits of two GPUs are from those of one in float32."""
    model, precision = random_model(place, EXACT_LAYERS), Precision(mode="fp32")
    found = []
    for settings in ([precision], [precision, TensorParallel(devices=2)]):
        session: Any = open_session(model, settings, device)
        found.append(session.logits(random_tokens(session, 2, 64, seed=0)).double().cpu())
        session.close()
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def _measured(
    way: str,
    model: Path,
    settings: Sequence[Setting],
    device: str,
    logits_file: Path,
    cells: Sequence[tuple[int, ...]],
    until: float,
) -> dict[str, Any]:
    """Return what one way gives; an error is part of it, so that the others are measured."""
    begin = time.monotonic()
    try:
        session: Any = open_session(model, settings, device)
    except Exception as error:
        return {"failure": str(error), "traceback": traceback.format_exc()}
    kinds = {type(setting) for setting in settings}
    new_tokens = FEW_TOKENS if Offload in kinds else MANY_TOKENS if CudaGraphs in kinds else NEW_TOKENS
    found: dict[str, Any] = {"opened_s": round(time.monotonic() - begin, 1), "cells": []}
    try:
        found |= _logits_checked(
            session.logits(random_tokens(session, 2, 64, seed=0)), logits_file, first=way.startswith("one GPU")
        )
        for batch, prompt in cells:
            if time.monotonic() < until:
                found["cells"].append(_timed(session, batch, prompt, new_tokens))
        found["notes"] = list(session.notes)
    except Exception as error:
        found |= {"failure": str(error), "traceback": traceback.format_exc()}
    session.close()
    return found


def _logits_checked(logits: Tensor, file: Path, first: bool) -> dict[str, Any]:
    """Keep the logits of one GPU; return how far others are from them."""
    logits = logits.cpu()
    if first:
        torch.save(logits, file)
    if not file.exists():
        return {"logits": "nothing to compare with: measure `one GPU` first"}
    expected = torch.load(file)
    error = ((logits - expected).norm() / expected.norm()).item()
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return {"logits_error": error, "same_likeliest_token": same}


def _timed(session: Any, batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
    tokens = random_tokens(session, batch, prompt, seed=1)
    begin = time.monotonic()
    answer(session, tokens, new_tokens)
    warm_up_s = time.monotonic() - begin
    with peak_of(session) as peak:
        timings = [answer(session, tokens, new_tokens) for _ in range(REPEATS)]
    step_s = statistics.median(gap for each in timings for gap in each.between_tokens_s)
    return {
        "batch": batch,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "warm_up_s": round(warm_up_s, 2),
        "first_token_s": [each.first_token_s for each in timings],
        "decode_s": [each.decode_s for each in timings],
        "prefill_tokens_per_s": batch * prompt / statistics.median(each.first_token_s for each in timings),
        "decode_tokens_per_s": batch * (new_tokens - 1) / statistics.median(each.decode_s for each in timings),
        "median_step_s": step_s,
        "decode_bytes": session.decode_bytes(batch, prompt + new_tokens // 2),
        "peak_bytes": list(peak.each) or [peak.size_bytes],
    }


def _markdown(record: dict[str, Any]) -> Iterator[str]:
    environment = record["environment"]
    yield (
        ", ".join(
            f"{name} {environment[name]}"
            for name in ("device_name", "driver", "torch", "transformers")
            if name in environment
        )
    )
    yield f"\nmodel made in {record['made_s']} s, everything in {record.get('seconds', '-')} s\n"
    yield (
        "| way | batch x prompt | prefill tokens/s | decode tokens/s | median step | peak of each GPU | logits' error |"
    )
    yield "|---|---|---|---|---|---|---|"
    for way, found in record["ways"].items():
        error = found.get("logits_error")
        for cell in found.get("cells", ()):
            peaks = ", ".join(size_text(size or 0) for size in cell["peak_bytes"])
            rates = (
                f"{cell['prefill_tokens_per_s']:,.0f} | {cell['decode_tokens_per_s']:,.1f} | "
                f"{1000 * cell['median_step_s']:.2f} ms"
            )
            yield (
                f"| {way} | {cell['batch']} x {cell['prompt']} | {rates} | {peaks} | "
                f"{'-' if error is None else f'{error:.2e}'} |"
            )
    for way, found in record["ways"].items():
        for note in found.get("notes", ()):
            yield f"\n{way}: {note}"
        if "failure" in found:
            yield f"\n{way}: FAILED: {found['failure']}"
    if (exact := record.get("float32_error")) is not None:
        verdict = "" if exact <= MOST_ERROR else "FAILED: "
        yield f"\n{verdict}logits of two GPUs in float32, {EXACT_LAYERS} layers: {exact:.2e} from those of one"


if __name__ == "__main__":
    main()
