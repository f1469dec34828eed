"""What differs from process to process when one model is timed, and how often the model then
differs from itself: a Markdown table.

    python tests/benchmarks/process_effect.py [MODEL] [--device cuda] [--processes 32] [--samples FILE]

Opens the model in so many fresh processes, one after another, as `throughput` does in its turns.
Pairs of neighbours are A and B of an A/A comparison of four turns: the share of comparisons that
find a difference should be 5%. It is told of the comparisons that follow each other, and of many
that take any four pairs, each either way round. Without a model: random weights in the shape of
SmolLM2-135M.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from optkit_evals.throughput import Throughput

from optkit.common.statistics import mean, paired_ratio
from optkit.environment import best_device
from optkit.measure import TURNS, EvalContext
from optkit.measuring.fresh_process import measure_apart

SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
METRICS = "prefill_tokens_per_s", "decode_tokens_per_s"
Pair = tuple[float, float]


def main() -> int:
    """Measure in each process, and print what differs."""
    given = _arguments()
    device = given.device or best_device()
    eval = Throughput(
        prompts=(given.prompt,),
        new_tokens=given.new_tokens,
        repeats=given.repeats * TURNS,
        limit_s=given.limit_s * TURNS,
    )
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in METRICS}
    with tempfile.TemporaryDirectory(prefix="process-effect-") as folder:
        model = given.model or random_model(Path(folder) / "model", device)
        for index in range(given.processes):
            started = time.perf_counter()
            (answer,) = measure_apart(model, (), [eval], device, False, EvalContext(), 0)
            samples = {metric.name: metric.samples for metric in answer.found.metrics}
            for name in METRICS:
                found[name].append(samples[name])
            said = ", ".join(f"{name} {mean(samples[name]):,.1f}" for name in METRICS)
            print(f"process {index + 1}: {said}; {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if given.samples:
        given.samples.write_text(json.dumps(found))
    where, threads = answer.environment, f", {answer.environment['cpu_threads']} threads" if device == "cpu" else ""
    print(
        f"{where['device_name']}{threads}, torch {where['torch']}: {given.model or 'random weights'}, "
        f"prompt {given.prompt},",
        end=" ",
    )
    print(f"{given.new_tokens} new tokens, {given.processes} processes\n")
    print(
        "| metric | mean | between processes | within | A/A in turn that differ | of any pairs "
        "|\n|---|---|---|---|---|---|"
    )
    for name, runs in found.items():
        print(f"| {row(name, runs, given.seed)} |")
    return 0


def row(name: str, runs: Sequence[Sequence[float]], seed: int) -> str:
    """Return the cells of one metric, whose repeats each process made."""
    values = [mean(run) for run in runs]
    between, within = spreads(runs)
    pairs = list(zip(values[::2], values[1::2], strict=False))
    ordered = [pair if index % 2 == 0 else pair[::-1] for index, pair in enumerate(pairs)]
    in_turn = [differs(ordered[start : start + TURNS]) for start in range(0, len(ordered) - TURNS + 1, TURNS)]
    chance = random.Random(seed)
    anyhow = [differs([pair[:: chance.choice((1, -1))] for pair in chance.sample(pairs, TURNS)]) for _ in range(2000)]
    shares = f"{sum(in_turn)} of {len(in_turn)} | {sum(anyhow) / len(anyhow):.1%}"
    return f"{name} | {mean(values):,.1f} | {between:.2%} | {within:.2%} | {shares}"


def spreads(runs: Sequence[Sequence[float]]) -> Pair:
    """Return the standard deviations between and within processes over the mean (analysis of
    variance, one way).
    """
    values = [mean(run) for run in runs]
    centre = mean(values)
    degrees = sum(len(run) - 1 for run in runs)
    within = sum((sample - value) ** 2 for run, value in zip(runs, values, strict=True) for sample in run) / degrees
    of_means = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    between = max(0.0, of_means - within * mean([1 / len(run) for run in runs]))
    return math.sqrt(between) / centre, math.sqrt(within) / centre


def differs(pairs: Sequence[Pair]) -> bool:
    """Say whether the interval of a ratio, which is 1, does not hold 1."""
    low, high = paired_ratio([first for first, _ in pairs], [second for _, second in pairs]).interval or (1.0, 1.0)
    return not low <= 1 <= high


def random_model(directory: Path, device: str) -> Path:
    """Write random weights in the shape of SmolLM2-135M."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, rms_norm_eps=1e-5, tie_word_embeddings=True)).to(
        torch.float32 if device == "cpu" else torch.bfloat16
    )
    model.save_pretrained(directory)
    return directory


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="of a process, at least")
    parser.add_argument("--limit-s", type=float, default=15.0, help="of a process, for its repeats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="keep every repeat of every process in this JSON file")
    given = parser.parse_args()
    if given.processes < 2 * TURNS or given.repeats < 2:
        parser.error(f"an A/A comparison needs {2 * TURNS} processes of 2 repeats or more")
    return given


if __name__ == "__main__":
    sys.exit(main())
