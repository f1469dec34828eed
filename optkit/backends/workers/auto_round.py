"""Worker of auto-round 0.16: AutoRound itself in GPTQ's layout, and its AWQ in AutoAWQ's GEMM layout.
Of AWQ weights are rounded to nearest after the scaling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from auto_round import AutoRound
from auto_round.algorithms.quantization.rtn.config import RTNConfig
from auto_round.algorithms.transforms.awq.config import AWQConfig
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from optkit.backends.workers.launch import Job


def quantize(job: Job) -> dict[str, Any]:
    """Quantize and save; returns nothing of note."""
    scheme = next(iter(job.layers.values()))
    grid = {
        "bits": scheme["bits"],
        "group_size": scheme["group_size"],
        "sym": scheme["symmetric"],
        "data_type": "int",
        "act_bits": 16,
    }
    size, length = job.fields["batch_size"], len(job.windows[0])
    learns = job.method == "gptq"
    if learns:
        way: dict[str, Any] = {"iters": job.fields["learning_steps"]}
    else:
        awq = AWQConfig(n_grid=job.fields["grid_points"], seqlen=length, nsamples=len(job.windows))
        way = {"alg_configs": [awq, RTNConfig(disable_opt_rtn=True)]}
    rounder = AutoRound(
        job.load_model(),
        AutoTokenizer.from_pretrained(job.source, local_files_only=True),
        scheme=grid,
        layer_config={name: {"bits": 16} for name in job.kept if name != "lm_head"},
        dataset=DataLoader(TensorDataset(torch.tensor(job.windows)), batch_size=size, collate_fn=_rows),
        nsamples=len(job.windows),
        seqlen=length,
        batch_size=size,
        device_map=job.device,
        seed=job.seed,
        **way,
    )
    job.start(f"auto_round {job.method}", 1, "model")
    rounder.quantize_and_save(str(job.target), format="auto_gptq" if learns else "auto_awq")
    for path in next(job.target.glob("*/config.json")).parent.iterdir():  # it saves below a name of its own
        path.rename(job.target / path.name)
    job.advance("saved")
    return {}


def _rows(batch: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row for (row,) in batch])
