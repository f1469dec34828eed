"""Triton code of `column_kernels`; importing this needs Triton."""
# Triton reads the source of these functions, so their arguments have no types; pointers are to
# float32 [layers, inputs, outputs], row by row, and a program works on one layer. padded is inputs
# as the next power of two, width the outputs of a program.

import triton
import triton.language as tl


@triton.jit
def search_kernel(
    weights, importance, tried, exact, scales, zeros, rows, groups, size, candidates, middle, top,
    padded: tl.constexpr, width: tl.constexpr, shifts: tl.constexpr,
):  # fmt: skip
    """Find the scale and the zero point of each group of weights with the least squared error.

    weights: [rows, size], one group a row; importance: [groups, size]; tried: [candidates, rows];
    exact, scales, zeros: [rows].
    """
    row = tl.program_id(0) * width + tl.arange(0, width)
    column = tl.arange(0, padded)
    here = row < rows
    there = here[:, None] & (column[None, :] < size)
    value = tl.load(weights + row[:, None] * size + column[None, :], mask=there, other=0.0)
    counted = tl.load(importance + (row % groups)[:, None] * size + column[None, :], mask=there, other=0.0)
    origin = tl.load(exact + row, mask=here, other=0.0)
    scale, zero = tl.load(tried + row, mask=here, other=1.0), origin
    least = tl.full((width,), float("inf"), tl.float32)
    for index in range(candidates):
        step = tl.load(tried + index * rows + row, mask=here, other=1.0)
        for turn in tl.static_range(shifts):
            shift = origin
            if turn == 1:
                shift = tl.maximum(origin - 1, 0.0)
            if turn == 2:
                shift = tl.minimum(origin + 1, top)
            code = value / step[:, None] + (shift - middle)[:, None]
            code = tl.minimum(tl.maximum(code, -middle), top - middle)
            code = (code + 12582912.0) - 12582912.0 + middle  # 1.5 * 2^23 leaves no place for fractions
            off = (code - shift[:, None]) * step[:, None] - value
            error = tl.sum(off * off * counted, 1)
            better = error < least
            least = tl.where(better, error, least)
            scale = tl.where(better, step, scale)
            zero = tl.where(better, shift, zero)
    tl.store(scales + row, scale, mask=here)
    tl.store(zeros + row, zero, mask=here)


@triton.jit
def normal_kernel(
    hessian, steps, normal, inputs, outputs, row, layer,
    number: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Find what the scales of two groups pull at each other: steps^T hessian steps, group by group.

    hessian: [layers, inputs, inputs]; steps: whole numbers up to 256 [layers, inputs, outputs], of which rows are
    `row` apart and layers `layer`; normal: [layers, outputs, groups, groups], of which the lower triangle is filled.
    Products are exact: three parts of the Hessian in bfloat16, which is `number`, are all of it.
    """
    group, groups = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * width + tl.arange(0, width)
    there = (column < outputs)[None, :]
    inside = tl.arange(0, size)
    hessian += tl.program_id(2).to(tl.int64) * inputs * inputs
    steps += tl.program_id(2).to(tl.int64) * layer
    normal += (tl.program_id(2).to(tl.int64) * outputs + column) * groups * groups + group * groups
    mine = group * size + inside
    own = tl.load(steps + mine[:, None] * row + column[None, :], mask=there, other=0.0).to(number)
    for other in range(group + 1):
        theirs = other * size + inside
        part = tl.load(hessian + theirs[:, None] * inputs + mine[None, :])
        high = part.to(number)
        rest = part - high.to(tl.float32)
        middle = rest.to(number)
        pulled = tl.dot(high, own)
        pulled = tl.dot(middle, own, pulled)
        pulled = tl.dot((rest - middle.to(tl.float32)).to(number), own, pulled)
        step = tl.load(steps + theirs[:, None] * row + column[None, :], mask=there, other=0.0)
        tl.store(normal + other, tl.sum(pulled * step, 0), mask=column < outputs)
