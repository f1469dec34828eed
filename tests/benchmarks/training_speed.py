"""Tokens/s of trainings with and without torch.compile, on one device and two, as a Markdown table;
each makes the same steps.

    python tests/benchmarks/training_speed.py DATA MODEL [--only PATTERN] [--device DEVICE] [--steps N] \
        [--batch-size N] [--length N]

DATA holds `wikitext2_raw/` and `c4_sample/`. `distill` teaches MODEL without a fifth of its blocks,
`qat` and `lora_recover` train MODEL at 3 bits in groups of 64 (rounded to nearest). Losses are the
first and the last held-out one.
"""

import argparse
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from optkit.errors import OptkitError
from optkit.stage import Context, Transform
from optkit.stages.distill import Distill
from optkit.stages.lora_recover import LoraRecover
from optkit.stages.prune_structured import PruneStructured
from optkit.stages.qat import Qat
from optkit.stages.rtn import Rtn

CODES: dict[str, Any] = {"bits": 3, "group_size": 64}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "one, compiled": {"compile": True},
    "two, DDP": {"devices": 2},
    "two, DDP, compiled": {"devices": 2, "compile": True},
    "two, FSDP2": {"devices": 2, "parallel": "fsdp"},
    "two, FSDP2, compiled": {"devices": 2, "parallel": "fsdp", "compile": True},
}


def stages(shared: dict[str, Any], way: dict[str, Any]) -> dict[str, tuple[str, Transform]]:
    """Return the trainings by their names, each with the name of what it starts from."""
    made: dict[str, tuple[str, Transform]] = {
        "distill": ("fewer blocks", Distill(**shared, **way, learning_rate=1e-3)),
        "qat": ("model", Qat(**CODES, start="rtn", training={**shared, **way, "learning_rate": 1e-4})),
    }
    if way.get("parallel") != "fsdp":
        made["lora_recover"] = ("packed", LoraRecover(**shared, **way, learning_rate=5e-4))
    return made


def main() -> None:
    """Print a row for each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    asked = parser.parse_args()
    texts = ["c4", {"dataset": "wikitext2", "split": "validation"}]
    shared = {
        "texts": texts,
        "sequence_length": asked.length,
        "batch_size": asked.batch_size,
        "held_out": 32,
        "evaluations": 1,
        "epochs": 10,
    }
    shared |= {"patience": None, "tokens": asked.steps * asked.batch_size * asked.length}
    print(
        "| training | tokens/s | seconds of compiling | held-out loss | GB at the peak |\n|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        context = Context(device=asked.device, data=asked.data, origin=asked.model)
        starts = {"model": asked.model, "fewer blocks": place / "fewer", "packed": place / "packed"}
        for start in ("fewer blocks", "packed"):
            starts[start].mkdir()
        text = {"dataset": "c4", "samples": 32, "sequence_length": asked.length}
        PruneStructured(remove_layers=0.2, calibration=text).run(asked.model, starts["fewer blocks"], context)  # type: ignore[arg-type]
        Rtn(**CODES).run(asked.model, starts["packed"], context)
        for way, fields in WAYS.items():
            for kind, (start, stage) in stages(shared, fields).items():
                name = f"{kind}, {way}"
                if fnmatch(name, asked.only):
                    print(f"| {name} | {measured(stage, starts[start], context, place / name)} |", flush=True)


def measured(stage: Transform, source: Path, context: Context, target: Path) -> str:
    """Train once; return the cells of a row."""
    target.mkdir()
    try:
        details = stage.run(source, target, context).details
    except OptkitError as error:
        return f"{error} | | |"
    losses = " to ".join(f"{details[when]['total']:.4f}" for when in ("held_out_before", "held_out_after"))
    peak = details["training"]["peak_bytes"] or 0
    return f"{details['tokens_per_s']:,.0f} | {details['compile_seconds']:.1f} | {losses} | {peak / 1e9:.1f}"


if __name__ == "__main__":
    main()
