"""Packed codes come back, and have the very bytes that compressed-tensors writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import (
    pack,
    pack_awq,
    pack_compressed_tensors,
    pack_gptq,
    packed_length,
    unpack,
    unpack_awq,
    unpack_compressed_tensors,
    unpack_gptq,
)

BITS = (2, 3, 4, 5, 6, 8)


def random_codes(rows: int, columns: int, bits: int, low: int = 0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, 1 << bits, (rows, columns), generator=generator, dtype=torch.int64).to(torch.uint8)


def random_weight(
    rows: int, columns: int, bits: int, group_size: int, symmetric: bool, seed: int = 0
) -> QuantizedWeight:
    groups = columns // group_size
    zeros = (
        torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)
        if symmetric
        else random_codes(rows, groups, bits, low=1, seed=seed + 1)
    )
    scales = torch.rand(rows, groups, generator=torch.Generator().manual_seed(seed + 2)) + 0.5
    return QuantizedWeight(random_codes(rows, columns, bits, seed=seed), scales.half().float(), zeros, bits)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 90),
    bits=st.sampled_from(BITS),
    dim=st.sampled_from((0, 1)),
    seed=st.integers(0, 99),
)
def test_unpack_undoes_pack(rows: int, columns: int, bits: int, dim: int, seed: int) -> None:
    codes = random_codes(rows, columns, bits, seed=seed)
    words = pack(codes, bits, dim)
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    assert words.shape[dim] == packed_length(codes.shape[dim], bits)
    assert torch.equal(unpack(words, bits, codes.shape[dim], dim), codes)


@pytest.mark.parametrize("bits", BITS)
def test_words_are_one_dense_bit_stream(bits: int) -> None:
    codes = random_codes(1, 64, bits, seed=3)
    stream = sum(int(code) << (index * bits) for index, code in enumerate(codes[0]))
    words = [(stream >> (32 * index)) & 0xFFFFFFFF for index in range(packed_length(64, bits))]
    assert [int(word) & 0xFFFFFFFF for word in pack(codes, bits, 1)[0]] == words


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(8, 64), (5, 37), (33, 96), (1, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_bytes_equal_compressed_tensors(bits: int, shape: tuple[int, int], dim: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(*shape, bits, seed=7)
    signed = (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(pack(codes, bits, dim), helpers.pack_to_int32(signed, bits, packed_dim=dim))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns", "group_size"), [(32, 64, 32), (32, 64, 64), (40, 96, 48), (7, 36, 12)])
def test_formats_come_back(bits: int, symmetric: bool, rows: int, columns: int, group_size: int) -> None:
    weight = random_weight(rows, columns, bits, group_size, symmetric)
    for packed in (
        unpack_compressed_tensors(pack_compressed_tensors(weight, symmetric, torch.float32), bits),
        unpack_gptq(pack_gptq(weight), bits),
    ):
        assert torch.equal(packed.codes, weight.codes)
        assert torch.equal(packed.zeros, weight.zeros)
        assert torch.equal(packed.scales.float(), weight.scales)
        assert packed.group_size == group_size


def test_zero_point_of_zero_has_no_gptq_form() -> None:
    weight = random_weight(8, 32, 4, 32, symmetric=False)
    with pytest.raises(ValueError, match="cannot hold a zero point of 0"):
        pack_gptq(QuantizedWeight(weight.codes, weight.scales, weight.zeros * 0, 4))


def test_symmetric_layers_carry_no_zero_points() -> None:
    weight = random_weight(8, 64, 4, 32, symmetric=True)
    assert set(pack_compressed_tensors(weight, True, torch.float32)) == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }
    assert pack_compressed_tensors(weight, True, torch.bfloat16)["weight_scale"].dtype == torch.bfloat16


def autoawq_pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack int [rows, out] as WQLinear_GEMM.from_linear of AutoAWQ 0.2.9 does."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32)
    for column in range(words.shape[1]):
        for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, column] |= codes[:, column * 8 + output].to(torch.int32) << (place * 4)
    return words


@settings(max_examples=30)
@given(
    eights=st.integers(1, 6), groups=st.integers(1, 4), group_size=st.sampled_from((8, 16, 32)), seed=st.integers(0, 99)
)
def test_awq_words_are_those_of_autoawq_and_come_back(eights: int, groups: int, group_size: int, seed: int) -> None:
    weight = random_weight(8 * eights, groups * group_size, 4, group_size, symmetric=False, seed=seed)
    tensors = pack_awq(weight)
    assert torch.equal(tensors["qweight"], autoawq_pack(weight.codes.T))
    assert torch.equal(tensors["qzeros"], autoawq_pack(weight.zeros.T))
    assert tensors["scales"].dtype == torch.float16
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    read = unpack_awq(tensors)
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.zeros, weight.zeros)
    assert torch.equal(read.scales.float(), weight.scales)


@pytest.mark.parametrize(("rows", "bits"), [(12, 4), (16, 3)])
def test_awq_holds_eight_codes_of_four_bits_in_a_word(rows: int, bits: int) -> None:
    weight = random_weight(rows, 32, bits, 16, symmetric=False)
    with pytest.raises(ValueError, match=f"a multiple of 8 outputs, not {bits} bits for {rows}$"):
        pack_awq(weight)
