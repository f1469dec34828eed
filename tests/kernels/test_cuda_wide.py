"""Products of 4-bit weights by wgmma: what a launch asks for anywhere, its numbers on an H100 or H200 against
float64.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from optkit.kernels.cuda.matrix import tiled
from optkit.kernels.cuda.schedule import Form
from optkit.kernels.cuda.wide import (
    KEPT_BYTES,
    MOST_SPLIT,
    REGISTERS,
    SHARED_BYTES,
    Lined,
    Widths,
    choose_widths,
    multiply_wide,
)
from tests.kernels.test_cuda_kernels import dense, difference, example

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="wgmma is Hopper's"
)
WIDTHS = [
    Widths(tokens, warpgroups, split)
    for tokens, warpgroups, split in product((32, 64, 128), (2, 4), range(1, MOST_SPLIT + 1))
    if tokens < 128 or warpgroups == 4
]


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_block_has_room_for_three_stages_and_a_thread_for_its_codes(widths: Widths) -> None:
    assert widths.stages >= 3
    assert widths.shared_bytes + KEPT_BYTES <= SHARED_BYTES * widths.warpgroups // 4
    for group_size, asymmetric in product((32, 64, 128, 256), (False, True)):
        depth = widths.depth(Form(4, 4096, 4096, torch.bfloat16, group_size, asymmetric))
        held = 8 + max(1, 128 // group_size) * (1 + asymmetric)
        assert depth == 1 or widths.tokens // 2 + depth * held <= REGISTERS


@pytest.mark.parametrize("inputs", [8, 128, 136, 576, 4096, 14336])
def test_each_block_of_a_cluster_has_inputs(inputs: int) -> None:
    for outputs, rows, gated in product((32, 4096, 6144, 28672, 128256), (17, 33, 64, 65, 128, 500), (False, True)):
        form = Form(4, outputs, inputs, torch.bfloat16, 32, asymmetric=False)
        widths = choose_widths(form, rows, gated, 132)
        assert widths in WIDTHS
        assert widths.split <= form.chunks
        blocks = widths.units(form, gated) * -(-rows // widths.tokens) * widths.split
        assert widths.split == 1 or blocks <= 132 * 4 // widths.warpgroups


@pytest.mark.parametrize("gelu", [False, True])
def test_gated_outputs_go_through_what_the_matrix_says(gelu: bool) -> None:
    form = Form(4, 4096, 4096, torch.bfloat16, 128, asymmetric=False, gelu=gelu)
    assert Widths(64, 2, 8).macros(form)["GELU"] == gelu == form.macros()["GELU"]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"),
    [(64, 256, 32), (4096, 4096, 128), (96, 576, 64), (608, 1152, 128), (32, 136, 136)],
)
def test_products_are_those_of_float64(
    outputs: int, inputs: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    limit = 8e-3 if dtype == torch.bfloat16 else 1e-3
    weight, codes = example(outputs, inputs, group_size, symmetric, "cuda")
    matrix, exact = tiled(weight, dtype, torch.randn(outputs, device="cuda")), dense(weight, codes, dtype)
    bias = matrix.bias.double()  # type: ignore[union-attr]
    for rows in (1, 32, 64, 100, 300):
        x = torch.randn(rows, inputs, device="cuda").to(dtype)
        norm = (torch.rand(inputs, device="cuda") + 0.5).to(dtype)
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
        before = torch.randn(rows, outputs, device="cuda").to(dtype)
        added, wide = before.clone(), torch.full((rows, outputs), torch.nan, device="cuda")
        full = normed @ exact.T + bias
        multiply_wide(matrix, x, added, add=True)
        multiply_wide(matrix, x, wide, norm=norm, epsilon=1e-5)
        assert difference(added, before.double() + x.double() @ exact.T + bias) < limit
        assert difference(wide, full) < limit
        for gelu in (False, True):
            gated = torch.full((rows, outputs // 2), torch.nan, dtype=dtype, device="cuda")
            multiply_wide(replace(matrix, gelu=gelu), x, gated, norm=norm, epsilon=1e-5, gated=True)
            gate, up = full.chunk(2, dim=-1)
            expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
            assert difference(gated, expected) < 2 * limit


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("widths", WIDTHS)
def test_all_widths_give_the_same_product_each_time(widths: Widths) -> None:
    weight, codes = example(1056, 2176, 64, False, "cuda")
    matrix, x = tiled(weight, torch.bfloat16), torch.randn(140, 2176, device="cuda").bfloat16()
    first, again = (torch.full((140, 1056), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiply_wide(matrix, x, first, widths=widths)
    multiply_wide(matrix, x, again, widths=widths)
    assert difference(first, x.double() @ dense(weight, codes, torch.bfloat16).T) < 8e-3
    assert again.equal(first)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("rows", [20, 64, 150])
def test_what_one_product_lines_up_is_what_the_next_one_reads(rows: int) -> None:
    first, behind = (tiled(example(*shape, 64, False, "cuda")[0], torch.bfloat16) for shape in ((768, 256), (96, 384)))
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    gated, lined = x.new_empty(rows, 384), Lined.empty(rows, 384, x)
    found = []
    for each in (gated, lined):
        y = x.new_empty(rows, 96)
        multiply_wide(first, x, each, gated=True)
        multiply_wide(behind, each, y)
        found.append(y)
    assert torch.isfinite(found[0]).all()
    assert found[0].equal(found[1])
