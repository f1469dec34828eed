import pytest
import torch
from torch import Tensor, nn

from optkit.kernels import embedding_bag_linear as bag
from optkit.kernels import integer_kernels as integer
from optkit.kernels.embedding_bag_linear import BagLinear, why_not_bag
from optkit.kernels.integer_kernels import packed_layer
from optkit.kernels.packed_linear import PackedLinear, PackedWeight
from tests.support.packed_models import random_packed

has_bags = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM")


def error(layer: nn.Module, hidden: Tensor, dense: Tensor, bias: Tensor) -> float:
    with torch.inference_mode():
        ours = layer(hidden).double()
    reference = hidden.double() @ dense.double().T + bias.double()
    assert ours.shape == reference.shape
    return float((ours - reference).norm() / reference.norm())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(64, 128, 32), (12, 60, 20), (40, 96, 96)])
def test_float32_is_exact(
    bits: int, symmetric: bool, shuffled: bool, outputs: int, inputs: int, group_size: int
) -> None:
    weight, dense = random_packed(outputs, inputs, group_size, bits, symmetric, shuffled)
    bias = torch.randn(outputs)
    layers: list[nn.Module] = [PackedLinear(weight, bias, torch.float32)]
    if why_not_bag(weight, "cpu") is None:
        layers.append(BagLinear(weight, bias, torch.float32))
    assert len(layers) == 1 + (bits != 3 and "fbgemm" in torch.backends.quantized.supported_engines)
    for layer in layers:
        for rows in (1, 3, bag.BAG_ROWS + 1):
            assert error(layer, torch.randn(2, rows, inputs), dense, bias) < 2e-6


def test_no_layer_keeps_a_float_copy() -> None:
    weight, _ = random_packed(128, 256, 64)
    codes = 128 * 256 // 2
    for layer in (PackedLinear(weight, None, torch.float32), BagLinear(weight, None, torch.float32)):
        held = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
        assert codes <= held <= codes + 128 * 4 * 4 + 256 * 4


@has_bags
def test_which_layer_is_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "why_not_coded", lambda weight, device: "there is no compiler")

    def chosen(dtype: torch.dtype, *shape: int, bits: int = 4) -> tuple[type, str]:
        layer, phrase = packed_layer(random_packed(*shape, bits=bits)[0], None, dtype, "cpu")
        return type(layer), phrase

    bag = "use FBGEMM's 4-bit CPU kernel, in float32, because there is no compiler"
    assert chosen(torch.float32, 64, 64, 32) == (BagLinear, bag)
    assert chosen(torch.bfloat16, 8, 64, 16)[0] is BagLinear
    assert chosen(torch.float32, 64, 64, 32, bits=3) == (
        PackedLinear,
        "are dequantized at each call, because FBGEMM has no kernel for 3 bits",
    )
    assert chosen(torch.float32, 7, 64, 32) == (
        PackedLinear,
        "are dequantized at each call, because 7 outputs do not fill whole bytes",
    )


def test_groups_of_different_sizes_are_dequantized() -> None:
    weight, _ = random_packed(16, 64, 32)
    uneven = torch.cat([torch.zeros(40), torch.ones(24)]).long()
    odd = PackedWeight(weight.words, weight.scales, None, uneven, 4, 64)
    layer, phrase = packed_layer(odd, None, torch.float32, "cpu")
    assert isinstance(layer, PackedLinear)
    assert "groups differ in size" in phrase or "x86" in phrase
    dense = (odd.codes().float() - 8) * odd.scales[:, uneven]
    assert error(layer, torch.randn(3, 64), dense, torch.zeros(16)) < 2e-6


def test_the_graph_reads_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = random_packed(64, 128, 32)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    able = [kernel for kernel in integer.KERNELS["cuda"] if kernel.refuses(weight, torch.bfloat16, "cuda") is None]
    assert [type(kernel.build(weight, None, torch.bfloat16)).__name__ for kernel in able] == ["TiledLinear"]


def test_buffers_are_where_the_words_are() -> None:
    words, scales = torch.empty(16, 8, dtype=torch.int32, device="meta"), torch.empty(16, 3, device="meta")
    layer = PackedLinear(PackedWeight(words, scales, None, None, 4, 64), None, torch.float32)
    assert {buffer.device.type for buffer in layer.buffers()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_on_a_gpu(bits: int) -> None:
    weight, dense = random_packed(40, 96, 96, bits, False, True)
    layer, phrase = packed_layer(
        PackedWeight(
            weight.words.cuda(), weight.scales.cuda(), weight.zeros.cuda(), weight.group_of_input.cuda(), bits, 96
        ),  # type: ignore[union-attr]
        None,
        torch.float32,
        "cuda",
    )
    assert isinstance(layer, PackedLinear)
    assert "because optkit's int4 kernel" in phrase
    hidden = torch.randn(5, 96)
    reference = hidden.double() @ dense.double().T
    assert float((layer(hidden.cuda()).double().cpu() - reference).norm() / reference.norm()) < 2e-5
