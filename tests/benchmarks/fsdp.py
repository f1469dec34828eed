"""One training on one GPU and divided over two by FSDP2: loss curves, tokens per second, MFU,
predicted and measured memory.

    python3 tests/benchmarks/fsdp.py --out $OUT
        two GPUs, a Llama of 1.04 billion random weights, about 3 minutes
    python3 tests/benchmarks/fsdp.py --out $OUT --tiny              two processes on the CPU, to see that it works

The same sequences in the same order, made from a seed. What noise is, a third training says: on one
GPU, with each batch in two passes, which is the same sum in another order.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

ROOT = Path(__file__).parents[2]
for place in (ROOT, ROOT / "cli", ROOT / "evals"):
    sys.path.insert(0, str(place))

from optkit.progress import SilentProgress, SilentTask  # noqa: E402
from optkit.stage import Context, Report, Transform  # noqa: E402

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
WARM_UP = 5
"""Steps that are not timed."""


class Clock(SilentProgress):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def task(self, label: str, total: int, unit: str = "") -> SilentTask:
        """Return a bar whose advances are noted."""
        ends = self.ends

        class Noting(SilentTask):
            def advance(self, steps: int = 1, note: str = "") -> None:
                if note:
                    ends.append(time.perf_counter())

        return Noting()


class Training(Transform):
    """Train random weights on made-up sequences by the loop of `distill`, by as many processes as
    there are.
    """

    steps: int
    batch_size: int
    accumulation: int = 1
    length: int
    vocabulary: int
    parallel: Literal["ddp", "fsdp"] = "fsdp"
    version: ClassVar[int] = 1

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Return the curve, the seconds of the steps and the record of the training."""
        import torch

        from optkit.errors import StageError
        from optkit.training.data import split
        from optkit.training.loop import Loop
        from optkit.training.objective import LossWeights, Objective
        from optkit.training.predicted_memory import Setup, predicted_memory
        from optkit.training.ranks import current
        from optkit.training.student import open_student
        from optkit.training.training_options import TrainingOptions
        from optkit.training.training_report import Trainee, account, spending

        ranks, clock = current(self.parallel), Clock()
        generator = torch.Generator().manual_seed(context.seed)
        count = self.steps * self.batch_size * self.accumulation + 8
        start = torch.randint(0, self.vocabulary, (count, 1), generator=generator)
        stride = torch.randint(1, 8, (count, 1), generator=generator)
        tokens = (start + stride * torch.arange(self.length)) % self.vocabulary
        data = split(tokens, ["made up"] * count, held_out=8, seed=0, where="fsdp")
        options = TrainingOptions(
            self.steps,
            self.batch_size,
            self.accumulation,
            learning_rate=2e-4,
            evaluations=1,
            patience=None,
            checkpoint_minutes=None,
        )
        with spending(context.device) as spent:
            student = open_student(source, context.device)
            objective = Objective(student.model, LossWeights(0.0, 1.0), None, torch.bfloat16)
            shape = student.checkpoint.shape
            loop = Loop(objective, data, None, options, "fsdp", clock, ranks=ranks)
            try:
                result = loop.run()
            except StageError as error:
                raise StageError(
                    f"{error}; losses {[round(each, 3) for each in loop.course.curve]}", where="fsdp"
                ) from error
        positions = self.batch_size * self.length
        kind = context.device.partition(":")[0]
        setup = Setup(
            positions, self.length, True, False, self.accumulation, divergence=False,
            device=kind, devices=ranks.count, parallel=self.parallel,
        )  # fmt: skip
        trainee = Trainee(shape, self.length, "bf16", False, None, None)
        record = account(result, trainee, spent, ranks, self.parallel, predicted_memory(shape, setup))
        steps_s = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
        details = {
            "steps_s": steps_s,
            "curve": result.course.curve,
            "held_out": [each["total"] for each in result.course.held_out],
        }
        return Report(changed=1, details=details | record.details())


def main() -> None:
    """Run the trainings and write fsdp.json and fsdp.md."""
    from tests.benchmarks.fsdp import Training as Importable  # by its name, which the processes import

    os.environ.update({name: os.environ.get(name, value) for name, value in SAFE.items()})
    asked = _asked()
    sizes = (
        {"vocabulary": 512, "length": 64, "batch_size": 4}
        if asked.tiny
        else {"vocabulary": 32768, "length": 1024, "batch_size": 32}
    )
    device = "cpu" if asked.tiny else "cuda"
    asked.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        model = _model(Path(place) / "model", SMALL if asked.tiny else LARGE, sizes["vocabulary"], device)
        halves = {**sizes, "batch_size": sizes["batch_size"] // 2, "accumulation": 2}
        ways = {"one": (1, sizes, "fsdp"), "two, fsdp": (2, sizes, "fsdp"), "one, two passes": (1, halves, "fsdp")}
        ways |= {"two, ddp": (2, sizes, "ddp")} if asked.ddp else {}
        for name, (devices, fields, parallel) in ways.items():
            begun = time.perf_counter()
            stage = Importable(steps=asked.steps, parallel=parallel, **fields)
            found[name] = _train(stage, model, Path(place), device, devices) | {"wall_s": time.perf_counter() - begun}
            (asked.out / "fsdp.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(name, f"{time.perf_counter() - begun:.0f} s", flush=True)
    text = _page(found, sizes["batch_size"] * sizes["length"], device)
    (asked.out / "fsdp.md").write_text(text, encoding="utf-8")
    print(text)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ddp", action="store_true", help="also by DDP")
    return parser.parse_args()


def _model(directory: Path, sizes: dict[str, int], vocabulary: int, device: str) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=vocabulary, max_position_embeddings=2048, tie_word_embeddings=True)
    with torch.device(device):
        LlamaForCausalLM(config).save_pretrained(directory)
    if device == "cuda":
        torch.cuda.empty_cache()
    return directory


def _train(stage: Transform, model: Path, place: Path, device: str, devices: int) -> dict[str, Any]:
    import gc

    import torch

    from optkit.training.launch import launch

    context = Context(device=device, seed=1)
    target = place / "target"
    target.mkdir(exist_ok=True)
    if devices > 1:
        return dict(launch(stage, model, target, context, devices, "fsdp").details)
    report = stage.run(model, target, context)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return dict(report.details)


def _page(found: dict[str, Any], step_tokens: int, device: str) -> str:
    """Return the table: speeds from the median step after the warm-up, and how far each curve is
    from that of one device.
    """
    import torch

    one = found["one"]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [
        f"# A training on one device and on two ({name}, torch {torch.__version__})",
        "",
        f"{step_tokens:,} tokens a step, bf16 autocast over float32 weights, {len(one['curve'])} steps; "
        f"tokens/s: median after {WARM_UP}.",
        "",
        "| training | tokens/s | ratio | MFU | first loss | last loss | held-out | largest difference | "
        "mean | peak | predicted | wall |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = _tokens_per_s(one, step_tokens)
    for way, each in found.items():
        rate = _tokens_per_s(each, step_tokens)
        record = each["training"]
        mfu = (record["speed"] or {}).get("mfu")
        scaled = f"{mfu * rate / record['speed']['tokens_per_s']:.1%}" if mfu else "-"
        apart = [abs(ours / theirs - 1) for ours, theirs in zip(each["curve"], one["curve"], strict=True)]
        predicted = sum(size for size in record["predicted"].values())
        lines.append(
            f"| {way} | {rate:,.0f} | {rate / base:.2f}x | {scaled} | {each['curve'][0]:.4f} | {each['curve'][-1]:.4f}"
            f" | {each['held_out'][-1]:.4f} | {max(apart):.1e} | {statistics.mean(apart):.1e} | "
            f"{(record['peak_bytes'] or 0) / 1e9:.2f} GB | {predicted / 1e9:.2f} GB | {each['wall_s']:.0f} s |"
        )
    return "\n".join(
        [*lines, "", "Differences of losses are relative to those of `one`; `one, two passes` says what noise is.", ""]
    )


def _tokens_per_s(each: dict[str, Any], step_tokens: int) -> float:
    return step_tokens / statistics.median(each["steps_s"][WARM_UP:])


if __name__ == "__main__":
    main()
