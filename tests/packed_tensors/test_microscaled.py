"""What a layer of 4-bit floats takes on disk."""

from typing import Literal

import pytest

from optkit.packed_tensors.base import quantization_config
from optkit.packed_tensors.microscaled import Microscaled


@pytest.mark.parametrize(("type", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25)])
def test_bits_of_a_weight(type: Literal["nvfp4", "mxfp4"], bits: float) -> None:
    tensors = Microscaled(type).tensors("BF16", 96, 64)
    global_scale = 32 if type == "nvfp4" else 0
    assert sum(8 * info.size_bytes for info in tensors.values()) == bits * 96 * 64 + global_scale


def test_both_in_one_model() -> None:
    found = quantization_config({"a": Microscaled("nvfp4"), "b": Microscaled("mxfp4"), "c": Microscaled("nvfp4")}, [])
    assert found["format"] == "mixed-precision"
    assert [(group["targets"], group["format"]) for group in found["config_groups"].values()] == [
        (["Linear"], "nvfp4-pack-quantized"),
        (["b"], "mxfp4-pack-quantized"),
    ]
