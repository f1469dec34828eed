"""The attention kernel of the decode step against float64, in every shape class: heads, groups,
shares of the past, lengths.
"""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from optkit.kernels.cuda.decoding import STAGE_ROWS, attention_stages
from optkit.kernels.cuda.nvrtc import compiled

pytestmark = pytest.mark.gpu
EPSILON = 1e-6


@dataclass(frozen=True)
class Case:
    batch: int
    past: int
    heads: int
    kv_heads: int
    size: int
    norms: bool = False
    rotary: int = 0
    """Channels that are turned; 0: all."""
    window: int = 0
    cap: float = 0.0
    sinks: bool = False


CASES = [
    *(
        Case(1, 0, 32, 8, 128),
        Case(2, 1, 32, 8, 128),
        Case(5, 1023, 32, 8, 128, norms=True),
        Case(1, 777, 16, 1, 128),
        Case(33, 70, 8, 8, 128),
    ),
    *(
        Case(16, 640, 9, 3, 64),
        Case(3, 17, 9, 3, 64),
        Case(1, 777, 12, 1, 64, norms=True),
        Case(1, 300, 4, 4, 256),
        Case(2, 130, 4, 4, 96, norms=True),
    ),
    *(Case(2, 130, 4, 2, 80), Case(1, 63, 4, 2, 32), Case(2, 500, 2, 1, 16, norms=True), Case(1, 64, 7, 1, 48)),
    *(
        Case(2, 700, 32, 8, 128, window=128),
        Case(2, 40, 8, 4, 64, window=128),
        Case(2, 300, 8, 4, 256, window=100, cap=1.5),
        Case(3, 333, 64, 8, 64, window=128, sinks=True),
        Case(2, 200, 24, 8, 128, rotary=96, norms=True),
        Case(1, 90, 8, 2, 128, rotary=32, cap=2.0, sinks=True),
    ),
]


def turned(heads: Tensor, norm: Tensor | None, cosines: Tensor, sines: Tensor) -> Tensor:
    """float64 [batch, heads, size]; cosines, sines [rotary / 2]."""
    if norm is not None:
        heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPSILON) * norm.double()
    rotary = 2 * len(cosines)
    first, second = heads[..., :rotary].chunk(2, dim=-1)
    parts = first * cosines - second * sines, second * cosines + first * sines, heads[..., rotary:]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
@pytest.mark.parametrize(
    ("case", "shares", "clustered"), [*product(CASES, (1, 3, 10), (False,)), *product(CASES, (3, 16), (True,))]
)
def test_attention_is_that_of_float64(
    case: Case, shares: int, clustered: bool, dtype: torch.dtype, limit: float
) -> None:
    batch, past, heads, kv_heads, size = case.batch, case.past, case.heads, case.kv_heads, case.size
    rotary, oldest = case.rotary or size, max(0, past + 1 - case.window) if case.window else 0
    torch.manual_seed(past)
    with torch.device("cuda"):
        capacity = past + 5
        qkv = torch.randn(batch, (heads + 2 * kv_heads) * size).to(dtype)
        cache = torch.randn(2, batch, kv_heads, capacity, size).to(dtype)
        cache[:, :, :, past:] = cache[:, :, :, :oldest] = math.nan  # nothing there is read
        angles = torch.arange(capacity)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
        cosines, sines = angles.cos(), angles.sin()
        norms = [torch.rand(size).to(dtype) + 0.5 if case.norms else None for _ in range(2)]
        sinks = torch.randn(heads).to(dtype) if case.sinks else None
        partial = torch.zeros(batch * heads * shares * (size + 2))
        arrived = torch.zeros(batch * kv_heads, dtype=torch.int32)
        output = torch.full((batch, heads * size), math.nan, dtype=dtype)
        position = torch.tensor([past], dtype=torch.int32)
    known = cache[:, :, :, oldest:past].clone()
    macros = {"HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size, "ROTARY": rotary, "SHARES": shares}
    macros |= {"QK_NORM": bool(case.norms), "CAPPED": bool(case.cap), "CLUSTER": clustered}
    stages = attention_stages(size, 1 + batch % 2, torch.device("cuda", 0))
    macros |= {"BF16": dtype == torch.bfloat16, "STAGES": stages}
    launch = 128, stages * STAGE_ROWS * size * 2
    kernel = compiled("attention.cu", "attend", macros, 0)
    arguments = (
        qkv,
        cache[0],
        cache[1],
        cosines,
        sines,
        position,
        capacity,
        size**-0.5,
        *norms,
        EPSILON,
        case.window,
        case.cap,
        sinks,
        partial,
        arrived,
        output,
        *(None, None, None),
    )
    for _ in range(2):  # the counters are as they were
        kernel((kv_heads, shares, batch), launch[0], arguments, launch[1])
    if heads * size % 128 == 0:
        lined = torch.full((64, heads * size), math.nan, dtype=dtype, device="cuda")
        macros |= {"LINED": 64}
        kernel = compiled("attention.cu", "attend", macros, 0)
        kernel((kv_heads, shares, batch), launch[0], (*arguments[:-4], lined, *arguments[-3:]), launch[1])
        # inputs 8 t + p and 8 t + 4 + p of 32 are word t of unit p
        in_order = lined.view(-1, 4, 64, 4, 2).permute(2, 0, 3, 4, 1).reshape(64, heads * size)
        assert in_order[:batch].equal(output)
    query, key, value = qkv.double().view(batch, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    query, key = (
        turned(x, norm, cosines[past].double(), sines[past].double())
        for x, norm in zip((query, key), norms, strict=True)
    )
    keys, values = (
        torch.cat([old.double(), new[:, :, None]], dim=2) for old, new in zip(known, (key, value), strict=True)
    )
    group = heads // kv_heads
    scores = torch.einsum("bhgc,bhkc->bhgk", query.view(batch, kv_heads, group, size), keys) * size**-0.5
    scores = case.cap * torch.tanh(scores / case.cap) if case.cap else scores
    if sinks is not None:
        rest = sinks.double().view(1, kv_heads, group, 1).expand(batch, -1, -1, 1)
        scores = torch.cat([scores, rest], dim=-1)
    chances = scores.softmax(-1)[..., : keys.shape[2]]
    expected = torch.einsum("bhgk,bhkc->bhgc", chances, values).reshape(batch, heads * size)
    assert (output.double() - expected).norm() < limit * expected.norm()
    assert (cache[0, :, :, past].double() - key).norm() < limit * key.norm()
    assert cache[1, :, :, past].equal(value.to(dtype))
    assert cache[:, :, :, past + 1 :].isnan().all()
    assert not arrived.any()
