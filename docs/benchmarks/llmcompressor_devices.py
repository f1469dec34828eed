r"""GPTQ of llm-compressor on as many GPUs as there are processes, and how far quantized models diverge.

    python -m torch.distributed.run --nproc_per_node 2 docs/benchmarks/llmcompressor_devices.py \
        quantize MODEL TOKENS TARGET
    python docs/benchmarks/llmcompressor_devices.py compare MODEL TOKENS MADE...

TOKENS is a safetensors file: `calibration`, int64 [samples, length], of which each process takes every
so many, and `held_out`. The first needs llmcompressor 0.14.0.1 alone, and quantizes as its example for several
GPUs does (examples/quantization_w4a16/llama3_ddp_example.py): 4 bits, groups of 128. The second prints
the mean KL of each model's next token from MODEL's, in nats.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

BATCH = 8


def quantize(model: str, tokens: str, target: str) -> None:
    """Quantize this process's share; the first says how long it took, from the model's files to the made ones."""
    from compressed_tensors.offload import init_dist
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.core import LifecycleCallbacks
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.utils import load_context
    from torch import distributed
    from transformers import AutoModelForCausalLM

    cuda, several = torch.cuda.is_available(), "RANK" in os.environ
    if several:
        init_dist() if cuda else distributed.init_process_group("gloo")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    started = time.perf_counter()
    rows = load_file(tokens)["calibration"][rank::ranks].tolist()
    with load_context():
        opened = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="auto_offload")
    end, ends = LifecycleCallbacks.sequential_epoch_end, [loaded := time.perf_counter()]

    def timed(*arguments: Any, **options: Any) -> Any:
        left = end(*arguments, **options)
        ends.append(time.perf_counter())
        return left

    LifecycleCallbacks.sequential_epoch_end = timed
    oneshot(
        model=opened,
        dataset=Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]),
        recipe=[GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])],
        max_seq_length=len(rows[0]),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
        batch_size=BATCH,
    )
    quantized = time.perf_counter()
    opened.save_pretrained(target, save_compressed=True)
    if several:
        distributed.barrier()
    found: dict[str, Any] = {"devices": ranks, "load_s": loaded - started, "oneshot_s": quantized - loaded}
    found |= {"save_s": time.perf_counter() - quantized, "whole_s": time.perf_counter() - started}
    found["block_s"] = median(after - before for before, after in pairwise(ends[1:-1]))  # without the first and lm_head
    found["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0
    if rank == 0:
        print("llm-compressor", json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
    if several:
        distributed.destroy_process_group()


def compare(model: str, tokens: str, *made: str) -> None:
    """Print the mean KL of models from the one that they were made of, on tokens that none was calibrated on."""
    from optkit.model.checkpoint import Checkpoint
    from optkit.model.skeleton import Skeleton
    from optkit.progress import SilentProgress
    from optkit.stages.sensitivity.held_out import mean_divergences

    device = "cuda" if torch.cuda.is_available() else "cpu"
    copies = [Checkpoint(Path(each)) for each in made]
    held_out = load_file(tokens)["held_out"]
    found = mean_divergences(Skeleton(Checkpoint(Path(model))), copies, held_out, device, SilentProgress())
    for name, divergence in zip(made, found, strict=True):
        print(f"KL of {name}: {divergence:.4g} nats, {held_out.numel():,} tokens", flush=True)


if __name__ == "__main__":
    {"quantize": quantize, "compare": compare}[sys.argv[1]](*sys.argv[2:])
