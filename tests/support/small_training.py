"""A training of a few steps that learns something."""

from pathlib import Path
from typing import Any

import torch

from optkit.progress import SilentProgress
from optkit.training.data import TrainingData, split
from optkit.training.loop import Loop
from optkit.training.objective import LossWeights, Objective
from optkit.training.student import open_student
from optkit.training.training_options import TrainingOptions, TrainingResult

OPTIONS = TrainingOptions(
    steps=12, batch_size=2, accumulation=2, learning_rate=1e-3, evaluations=4, patience=None, checkpoint_steps=3
)
CROSS_ENTROPY = LossWeights(divergence=0.0, cross_entropy=1.0)


def some_data(sequences: int = 60, length: int = 16, seed: int = 0) -> TrainingData:
    """Return sequences in which a token tells the next one, so that there is something to learn."""
    start = torch.randint(0, 64, (sequences, 1), generator=torch.Generator().manual_seed(5))
    tokens = (start + 3 * torch.arange(length)) % 64
    return split(tokens, [f"text, row {row}" for row in range(sequences)], held_out=4, seed=seed, where="test")


def run(
    source: Path, options: TrainingOptions = OPTIONS, place: Path | None = None, **rest: Any
) -> tuple[Objective, TrainingResult]:
    """Train the model in `source` on `some_data`."""
    objective = Objective(open_student(source, "cpu").model, CROSS_ENTROPY)
    return objective, Loop(
        objective, some_data(), None, options, where="test", progress=SilentProgress(), place=place, **rest
    ).run()
