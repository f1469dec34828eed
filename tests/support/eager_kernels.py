"""The kernels of attention.cu, tokens.cu, exchange.cu, experts.cu, columns.cu and a part of linear.cu in torch, so
that a decode step and GPTQ run on a CPU. Each takes what the kernel takes; `linear` is here for experts in floats
alone, since dense products say the same of other matrices.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from optkit.algorithms import column_kernels
from optkit.algorithms.eight_bit import FLOAT8, INT8, round_inputs
from optkit.kernels.cuda import (
    columns,
    decoding,
    exchange,
    experts,
    finishing,
    matrix,
    prompts,
    step_layers,
    step_products,
)
from optkit.kernels.cuda.nvrtc import defined
from tests.support.signatures import check_launch

Macros = dict[str, int]
WANTED: dict[str, set[str]] = {
    "columns.cu": set(),
    "attention.cu": {"HEADS", "KV_HEADS", "SIZE", "ROTARY", "SHARES", "STAGES"},
    "tokens.cu": {"WIDTH", "VOCABULARY"},
    "experts.cu": {"EXPERTS", "CHOICES", "MOST"},
    "exchange.cu": {"RANK", "RANKS", "PACKETS"},
    "linear.cu": {"BITS", "INPUTS", "GROUP"},
    "finish.cu": {"BITS"},
}
LOW_HALF, TOP_BIT = (1 << 32) - 1, -1 << 63


@dataclass(frozen=True)
class Launch:
    """A kernel of a source, compiled with some macros."""

    source: str
    name: str
    macros: Macros
    compute: Callable[..., None]

    def __call__(
        self, grid: tuple[int, int, int], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0
    ) -> None:
        check_launch(self.source, self.name, self.macros, arguments)
        self.compute(self.macros, grid, *arguments)

    def again(
        self, grid: tuple[int, int, int], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0
    ) -> Callable[[int], None]:
        return lambda last: self(grid, threads, (*arguments[:-1], last), shared_bytes)


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let GraphDecoder run on CPU tensors, in float32 too."""
    for module in (decoding, exchange, experts, finishing, matrix):
        monkeypatch.setattr(module, "compiled", kernel)
    monkeypatch.setattr(exchange, "_shared_memories", lambda size, rank, device: [0] * distributed.get_world_size())
    monkeypatch.setattr(step_products, "MOST_STREAMED", defaultdict(int))
    monkeypatch.setattr(step_layers, "CODE_BASES", {torch.float32: 0, torch.bfloat16: 0})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    sizes = {"shared_memory_per_multiprocessor": 1 << 17, "shared_memory_per_block_optin": 99 << 10}
    properties = SimpleNamespace(multi_processor_count=2, **sizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (decoding, prompts):
        monkeypatch.setattr(module, "captured", lambda launch, beside=None: SimpleNamespace(replay=launch))


def kernel(source: str, name: str, macros: Mapping[str, int], device: int) -> Launch:
    """Return what `compiled` would."""
    named = defined(macros)
    assert WANTED[source] <= set(named), "NVRTC compiles the whole file, whichever kernel is asked for"
    return Launch(source, name, named, KERNELS[name])


def walk_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launches of columns.cu run on CPU tensors."""
    monkeypatch.setattr(columns, "compiled", kernel)
    monkeypatch.setattr(
        columns, "add_product_", lambda total, *parts: total.add_(torch.matmul(*map(Tensor.float, parts)))
    )
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(column_kernels, "walks", lambda tensor: True)


def embed(
    m: Macros, grid: Any, embedding: Tensor, tokens: Tensor, position: Tensor, hidden: Tensor, scale: float
) -> None:
    hidden.copy_(embedding[tokens[int(position)]] * scale)


def choose(m: Macros, grid: Any, logits: Tensor, best: Tensor) -> None:
    index = logits.argmax(-1)
    bits = logits.gather(1, index[:, None])[:, 0].view(torch.int32).to(torch.int64) & LOW_HALF
    best.copy_(torch.where(bits >> 31 > 0, LOW_HALF - bits, bits | 1 << 31) << 32 | LOW_HALF - index)


def keep(m: Macros, grid: Any, best: Tensor, tokens: Tensor, position: Tensor, batch: int) -> None:
    position += 1
    tokens[int(position)] = LOW_HALF - (best & LOW_HALF)


def sum_of_ranks(
    m: Macros,
    grid: Any,
    memories: Tensor,
    numbers: Tensor,
    x: Tensor,
    y: Tensor,
    of_outputs: Any,
    of_rows: Any,
    count: int,
) -> None:
    total = (x.float() * of_outputs * of_rows[: len(x), None]).to(x.dtype).float() if "SCALED" in m else x.float()
    distributed.all_reduce(total)
    y.copy_(total + y if "RESIDUAL" in m else total)


def agree(m: Macros, grid: Any, memories: Tensor, numbers: Tensor, best: Tensor, batch: int, share: int) -> None:
    unsigned = best - m["RANK"] * share ^ TOP_BIT  # in the order of signed numbers
    distributed.all_reduce(unsigned, distributed.ReduceOp.MAX)
    best.copy_(unsigned ^ TOP_BIT)


def arrange(
    m: Macros,
    grid: Any,
    x: Tensor,
    norm: Tensor | None,
    epsilon: float,
    codes: Tensor,
    scales: Tensor,
    count: int,
    given: Any,
) -> None:
    numbers = INT8 if "INTEGER" in m else FLOAT8
    normed = x if norm is None else F.rms_norm(x, norm.shape, norm, epsilon)
    found, each = round_inputs(normed.float(), numbers)
    if given is not None:
        found, each = numbers.round(normed.float() / given), given.expand(count)
    codes.copy_(found)
    scales.copy_(each.flatten())


def finish(
    m: Macros, grid: Any, products: Tensor, scales: Any, of_tokens: Any, bias: Any, y: Tensor, rows: int, tokens: int
) -> None:
    values = products.float() * scales * of_tokens[:, None] if "SCALED" in m else products.float()
    values = values if bias is None else values + bias
    if "GATED" in m:
        gate, up = values.chunk(2, -1)
        values = (F.gelu(gate, approximate="tanh") if "GELU" in m else F.silu(gate)) * up
    y.copy_(values + y if "RESIDUAL" in m else values)


def finish_coded(
    m: Macros, grid: Any, products: Tensor, scales: Any, of_tokens: Any, bias: Any, y: Tensor | None,
    norm: Tensor | None, epsilon: float, codes: Tensor, code_scales: Tensor, given: Any, tokens: int,
) -> None:  # fmt: skip
    kept = torch.bfloat16 if "BF16" in m else torch.float32
    made = products.new_empty(codes.shape, dtype=kept) if y is None else y
    finish(m, grid, products, scales, of_tokens, bias, made, 0, tokens)
    arrange(m, grid, made, norm, epsilon, codes, code_scales, tokens, given)


def turned(x: Tensor, norm: Tensor | None, epsilon: float, cosine: Tensor, sine: Tensor, m: Macros) -> Tensor:
    """x: [..., SIZE]; cosine, sine: [..., ROTARY / 2]."""
    rotary = m["ROTARY"]
    if "QK_NORM" in m:
        assert norm is not None
        x = F.rms_norm(x, norm.shape, norm, epsilon)
    a, b = x[..., :rotary].chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, x[..., rotary:]], -1)


def scaled_heads(m: Macros, qkv: Tensor, of_tokens: Any, scales: Any, bias: Any) -> Tensor:
    if "SCALED" not in m:
        return qkv
    values = qkv.float() * scales * of_tokens[:, None]
    return (values if bias is None else values + bias).to(qkv.dtype)


def turn_prompt(
    m: Macros, grid: Any, qkv: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor, prompt: int,
    capacity: int, query_norm: Any, key_norm: Any, epsilon: float, *scaled: Any,
) -> None:  # fmt: skip
    qkv.copy_(scaled_heads(m, qkv, *scaled))
    heads, kv_heads, size = m["HEADS"], m["KV_HEADS"], m["SIZE"]
    every = qkv.view(-1, prompt, heads + 2 * kv_heads, size)
    turns = cosines[:prompt, None], sines[:prompt, None]
    q, k, v = every.split([heads, kv_heads, kv_heads], 2)
    q.copy_(turned(q, query_norm, epsilon, *turns, m))
    keys[:, :, :prompt] = turned(k, key_norm, epsilon, *turns, m).transpose(1, 2)
    values[:, :, :prompt] = v.transpose(1, 2)


def attend(
    m: Macros, grid: Any, qkv: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor,
    position_of: Tensor, capacity: int, scaling: float, query_norm: Any, key_norm: Any, epsilon: float, window: int,
    cap: float, sinks: Any,
    shared: Tensor, arrived: Tensor, output: Tensor, *scaled: Any,
) -> None:  # fmt: skip
    heads, kv_heads, size, at = m["HEADS"], m["KV_HEADS"], m["SIZE"], int(position_of)
    qkv = scaled_heads(m, qkv, *scaled)
    q, k, v = qkv.view(len(qkv), -1, size).split([heads, kv_heads, kv_heads], 1)
    q = turned(q, query_norm, epsilon, cosines[at], sines[at], m)
    keys[:, :, at], values[:, :, at] = turned(k, key_norm, epsilon, cosines[at], sines[at], m), v
    past = slice(max(0, at + 1 - window) if window else 0, at + 1)
    grouped = heads // kv_heads
    scores = torch.einsum("bhc,bhkc->bhk", q, keys[:, :, past].repeat_interleave(grouped, 1)) * scaling
    scores = cap * torch.tanh(scores / cap) if "CAPPED" in m else scores
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(q), -1, 1)], -1)
    chances = scores.float().softmax(-1).to(q.dtype)[..., : at + 1 - past.start]
    output.copy_(torch.einsum("bhk,bhkc->bhc", chances, values[:, :, past].repeat_interleave(grouped, 1)).flatten(1))


def group(
    m: Macros, grid: Any, chosen: Tensor, groups: Tensor, order: Tensor, ends: Tensor, choices: int, count: int
) -> None:
    found, places = [], chosen.flatten().argsort(stable=True)
    order.copy_(places)
    ends.copy_(chosen.flatten().bincount(minlength=m["EXPERTS"])[: m["EXPERTS"]].cumsum(0))
    for start in range(0, choices):
        expert = int(chosen.flatten()[places[start]])
        if expert < m["EXPERTS"]:
            if not found or found[-1][0] != expert or found[-1][2] == m["MOST"]:
                found.append([expert, start, 0, 0])
            found[-1][2] += 1
    groups.zero_()[: len(found)] = torch.tensor(found, dtype=torch.int32)


def linear(
    m: Macros, grid: Any, weight: Tensor, scales: Any, offsets: Any, bias: Any, x: Tensor, sums: Any, norm: Any,
    epsilon: float, y: Tensor, rows: int, tokens: int, second_half: int, groups: Tensor, order: Tensor,
) -> None:  # fmt: skip
    assert grid[1] == len(groups)
    for expert, first, count, _ in groups.tolist():
        assert count <= tokens
        places, choices = torch.arange(first, first + count), order[first : first + count]
        source = x[choices // m["CHOICES"] if "GATED" in m else places]
        source = F.rms_norm(source, norm.shape, norm, epsilon) if "NORM" in m else source
        values = source @ weight.view(-1, rows, weight.shape[1])[expert].T
        if "GATED" in m:
            gate, up = values.chunk(2, -1)
            values = (F.gelu(gate, approximate="tanh") if "GELU" in m else F.silu(gate)) * up
        y[places if "GATED" in m else choices] = values


def route(
    m: Macros, grid: Any, logits: Tensor, chosen: Tensor, shares: Tensor, groups: Tensor, order: Tensor, ends: Tensor,
    tokens: int, count: int,
) -> None:  # fmt: skip
    chances, experts = logits.softmax(-1).topk(m["CHOICES"])
    chosen.copy_(experts)
    shares.copy_(chances / chances.sum(-1, keepdim=True) if "SHARED_OUT" in m else chances)
    if grid[0] == 1:
        group(m, grid, chosen, groups, order, ends, tokens * m["CHOICES"], count)


def weighted(m: Macros, grid: Any, made: Tensor, shares: Tensor, chosen: Tensor, total: Tensor, vectors: int) -> None:
    there = (chosen < m["EXPERTS"]).flatten()[:, None]
    values = (torch.where(there, made, 0).view(*chosen.shape, -1) * shares[..., None]).sum(1)
    total.copy_(values + total if "RESIDUAL" in m else values)


def nearest(m: Macros, values: Tensor, top: float) -> Tensor:
    cut = values.clamp(m["LOWEST"], top)
    exponents = (torch.frexp(cut).exponent - 1).clamp(min=m["SMALLEST"] - columns.BIAS) - m["MANTISSA"]
    step = torch.exp2(exponents.float())
    return (cut / step).round() * step


def block_of_columns(
    m: Macros, grid: Any, values: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, codes: Tensor, changed: Tensor,
    inputs: int, outputs: int, top: float, start: int,
) -> None:  # fmt: skip
    stop = min(start + columns.INPUTS, inputs)
    rest = values[..., start:stop, :].clone()
    high, again, low = changed.split(columns.INPUTS, -2)
    for i, at in enumerate(range(start, stop)):
        scale, zero, own, left = scales[..., at, :], zeros[..., at, :], factor[..., at, at, None], rest[..., i, :]
        if "DESCEND" in m:
            code = (left / (scale * own) + zero).round().clamp(0, top)
            off = (code - zero) * scale
        else:
            apart = "MANTISSA" in m
            code = nearest(m, left / scale, top) if apart else (left / scale + zero).round().clamp(0, top)
            off = (left - (code if apart else code - zero) * scale) / own
        rest[..., i + 1 :, :] -= factor[..., at, at + 1 : stop, None] * off[..., None, :]
        codes[..., at, :] = code
        high[..., i, :] = low[..., i, :] = -off
        again[..., i, :] = -off - high[..., i, :]


KERNELS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        *(embed, choose, keep, agree, arrange, finish, finish_coded, turn_prompt, attend),
        *(group, route, linear, weighted),
    )
} | {"sum": sum_of_ranks, "columns": block_of_columns}
