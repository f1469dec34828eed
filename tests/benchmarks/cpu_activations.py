"""What activations of fewer bits change in the products of packed weights on a CPU.

    python tests/benchmarks/cpu_activations.py ARTIFACT TEXT

ARTIFACT has 2, 4 or 8 bits and runs on optkit's CPU kernels; of the file TEXT the first 4 x 512
tokens are read. The rows of each product are rounded, eight at a time so that the kernel itself
keeps float32; `16 bits` is the kernel as it is, with all rows at once. Against float32: the mean
KL in nats a token, perplexity, and how often the greedy token is the same.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cpu import coded_linear
from optkit.session import open_session

GROUP = 32
KERNEL = coded_linear.packed_linear


def exact(rows: Tensor, *rest: Any) -> Tensor:
    """Return the products of rows in float32."""
    return torch.cat([KERNEL(few, *rest) for few in rows.split(8)])


def eight_bits(rows: Tensor, *rest: Any) -> Tensor:
    """Return the products of rows that have a scale for each 32 inputs."""
    groups = rows.view(len(rows), -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return exact(((groups / scales).round() * scales).view_as(rows), *rest)


def bfloat16(rows: Tensor, *rest: Any) -> Tensor:
    """Return the products of rows in bfloat16."""
    return exact(rows.bfloat16().float(), *rest)


WAYS: dict[str, Callable[..., Tensor]] = {
    "float32": exact,
    "16 bits": KERNEL,
    "bfloat16": bfloat16,
    "8 bits": eight_bits,
}


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("text", type=Path)
    asked = parser.parse_args()
    from transformers import AutoTokenizer

    text = asked.text.read_text(encoding="utf-8")[:40_000]
    tokens = AutoTokenizer.from_pretrained(asked.artifact)(text, return_tensors="pt").input_ids[0, : 4 * 512]
    windows = tokens.view(4, 512)
    session: Any = open_session(asked.artifact)
    told: dict[str, Tensor] = {}
    for name, way in WAYS.items():
        coded_linear.packed_linear = way
        with torch.inference_mode():
            logits = torch.cat([session.logits(window[None]) for window in windows])
        found = told.setdefault(name, logits.double().log_softmax(-1))
        base = told["float32"]
        kl = (base.exp() * (base - found)).sum(-1).mean()
        perplexity = (-found[:, :-1].gather(-1, windows[:, 1:, None])).mean().exp()
        same = (base.argmax(-1) == found.argmax(-1)).double().mean()
        print(f"{name}: KL {kl:.2g}, perplexity {perplexity:.4f}, the same greedy token {same:.1%}", flush=True)


if __name__ == "__main__":
    main()
