"""Blocks of ggml hold the very codes, as the package gguf reads them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import pack
from optkit.errors import StageError
from optkit.gguf.blocks import block_type, blocks_of
from optkit.kernels.packed_linear import PackedWeight

gguf = pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")


def packed(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedWeight:
    return PackedWeight(pack(codes, bits, 1), scales, zeros, None, bits, codes.shape[1])


def drawn(seed: int, bits: int, symmetric: bool, groups: int, group_size: int) -> PackedWeight:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (3, groups * group_size), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(3, groups, generator=draw) + 0.01).half().float() / 64
    zeros = None if symmetric else torch.randint(0, 1 << bits, (3, groups), generator=draw, dtype=torch.uint8)
    return packed(codes, scales.half().float(), zeros, bits)


def read(weight: PackedWeight) -> Tensor:
    kind = gguf.GGMLQuantizationType[block_type("layer", weight)]
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(blocks_of("layer", weight).numpy(), kind)))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    form=st.sampled_from([(4, True), (4, False), (8, True)]),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 96]),
)
def test_what_is_read_is_what_the_codes_say(seed: int, form: tuple[int, bool], groups: int, group_size: int) -> None:
    weight = drawn(seed, *form, groups, group_size)
    zeros = torch.full((3, groups), 1 << (form[0] - 1)) if weight.zeros is None else weight.zeros
    expected = QuantizedWeight(weight.codes(), weight.scales, zeros.to(torch.uint8), form[0]).dequantize()
    if form[1]:
        assert torch.equal(read(weight), expected)
        return
    least = (zeros.float() * weight.scales).repeat_interleave(group_size, 1)
    assert ((read(weight) - expected).abs() <= least * 2**-11 + 1e-7).all()  # the least value is a float16
    codes = (read(weight) + least.half().float()) / weight.scales.repeat_interleave(group_size, 1)
    assert torch.equal(codes.round().to(torch.uint8), weight.codes())


def test_the_types() -> None:
    assert block_type("x", drawn(0, 4, True, 1, 32)) == "Q4_0"
    assert block_type("x", drawn(0, 4, False, 1, 32)) == "Q4_1"
    assert block_type("x", drawn(0, 8, True, 1, 32)) == "Q8_0"
    middle = drawn(0, 4, False, 1, 32)
    assert block_type("x", packed(middle.codes(), middle.scales, torch.full((3, 1), 8, dtype=torch.uint8), 4)) == "Q4_0"


def test_what_no_type_has() -> None:
    def refused(weight: PackedWeight | None, why: str) -> None:
        with pytest.raises(
            StageError, match=f"a.layer: no type of GGUF has its codes. {why}.*Give it 4 bits, or 8 sym"
        ):
            block_type("a.layer", weight)

    refused(None, "Its weight is not integer codes with scales")
    refused(drawn(0, 3, True, 1, 32), "It has 3 bits")
    refused(drawn(0, 8, False, 1, 32), "It has 8 bits with zero points")
    refused(drawn(0, 4, True, 2, 16), "Its groups of 16 inputs are no multiple of 32")
    plain = drawn(0, 4, True, 2, 32)
    order = torch.arange(64) % 2
    refused(PackedWeight(plain.words, plain.scales, None, order, 4, 64), "Its inputs are grouped out of order")
    for scale in (1e6, 1e-12):
        with pytest.raises(StageError, match="a.layer: no type .* Some of its scales lie outside of float16"):
            blocks_of("a.layer", packed(plain.codes(), torch.full((3, 2), scale), None, 4))
