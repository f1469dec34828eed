"""How far two runs of `throughput` on an idle machine differ, metric by metric: a Markdown table,
exit status 1 beyond --most.

    python tests/benchmarks/repeatability.py [MODEL] [--device cuda] [--runs 2] [--prompt 128] \
        [--new-tokens 64] [--samples FILE]

Each run has an empty store, so that it measures, and a fresh process, as the eval has by default.
The difference is that of the furthest two runs, over the mean of all. Without a model: random
weights in the shape of SmolLM2-135M, in float32 on a CPU and bfloat16 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optkit
from optkit.common.statistics import mean
from optkit.environment import best_device
from optkit.measure import Metric

SMOLLM2 = {
    **{
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    },
    **{"num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


def main() -> int:
    """Measure, print, and say whether every metric is within the limit."""
    given = _arguments()
    device = given.device or best_device()
    with tempfile.TemporaryDirectory(prefix="repeatability-") as folder:
        model = given.model or random_model(Path(folder) / "model", device)
        runs = []
        for index in range(given.runs):
            started = time.perf_counter()
            scorecard = optkit.evaluate(
                str(model), evals_of(given, model), device=device, store=Path(folder) / f"store{index}"
            )
            runs.append([row.metric for row in scorecard.rows])
            print(
                f"run {index + 1}: {time.perf_counter() - started:.0f} s; {'; '.join(scorecard.notes)}",
                file=sys.stderr,
                flush=True,
            )
        environment = scorecard.environment
    if given.samples:
        given.samples.write_text(json.dumps([[metric.model_dump(mode="json") for metric in run] for run in runs]))
    threads = f", {environment['cpu_threads']} threads" if device == "cpu" else ""
    print(
        f"{environment['device_name']}{threads}, torch {environment['torch']}: {given.model or 'random weights'},",
        end=" ",
    )
    print(f"prompt {given.prompt}, {given.new_tokens} new tokens\n")
    worst = 0.0
    print(f"| metric | {' | '.join(f'run {index + 1}' for index in range(given.runs))} | difference | 95% of run 1 |")
    print("|---" * (given.runs + 3) + "|")
    for metrics in zip(*runs, strict=True):
        worst = max(worst, difference(metrics))
        print(f"| {row_of(metrics)} |")
    print(f"\nthe largest difference is {worst:.1%}, and {given.most:.0%} is allowed")
    return int(worst > given.most)


def evals_of(given: argparse.Namespace, model: Path) -> str:
    """Return the recipe that measures."""
    fields: dict[str, Any] = {"prompts": [given.prompt], "new_tokens": given.new_tokens, "repeats": given.repeats}
    return f"model: {json.dumps(str(model))}\nevals:\n  - throughput: {json.dumps(fields)}\n"


def difference(metrics: Sequence[Metric]) -> float:
    """Return how far the furthest two values lie apart, over the mean."""
    values = [metric.value for metric in metrics]
    return (max(values) - min(values)) / mean(values)


def row_of(metrics: Sequence[Metric]) -> str:
    """Return the cells of one metric."""
    first = metrics[0]
    low, high = first.interval or (first.value, first.value)
    values = " | ".join(f"{metric.value:,.4g}" for metric in metrics)
    return f"{first.name} | {values} | {difference(metrics):.1%} | ±{(high - low) / 2 / first.value:.1%}"


def random_model(directory: Path, device: str) -> Path:
    """Write random weights in the shape of SmolLM2-135M."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).to(torch.float32 if device == "cpu" else torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--device")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=float, default=0.03)
    parser.add_argument("--samples", type=Path, help="keep every metric with its raw samples in this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
