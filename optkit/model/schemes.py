"""What the `quantization_config` of config.json says of each layer: plain, or packed how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from optkit.model import expected_tensors
from optkit.model.expected_tensors import Layout

T = TypeVar("T")
Scheme: TypeAlias = tuple[str, Layout, Mapping[str, Any]]
"""Name of the layout, the layout, and the words of config.json that it reads."""
PLAIN: Scheme = ("plain", expected_tensors.plain, {})
POWERS_OF_TWO = ("U8", "F8_E8M0")
"""How the scales of 32 inputs are stored in the MX formats."""
LAYOUTS: dict[str, Layout] = {
    "dense": expected_tensors.plain,
    "pack-quantized": expected_tensors.pack_quantized,
    "int-quantized": partial(expected_tensors.one_code_each, dtype="I8"),
    "float-quantized": partial(expected_tensors.one_code_each, dtype="F8_E4M3"),
    "naive-quantized": expected_tensors.naive_quantized,
    "nvfp4-pack-quantized": expected_tensors.nvfp4,
    "mxfp4-pack-quantized": partial(expected_tensors.fp4, scale_dtypes=POWERS_OF_TWO),
    "mxfp8-quantized": partial(expected_tensors.one_code_each, dtype="F8_E4M3", scale_dtypes=POWERS_OF_TWO),
}
"""The formats of compressed-tensors."""


def scheme_of_layers(quantization: Mapping[str, Any] | None) -> Callable[[str, bool], Scheme]:
    """Return a function from a layer's name, and whether it lies in a decoder block, to its scheme.

    Raises ValueError for a method or format whose layout is not known here.
    """
    if not quantization:
        return lambda _name, _in_block: PLAIN
    method = quantization.get("quant_method")
    readers = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes}
    if method not in readers:
        raise ValueError(f"quant_method {method}")
    return readers[method](quantization)


def activation_bits(quantization: Mapping[str, Any]) -> int:
    """Return to how few bits layers round inputs or outputs, or attention keys and values; 0 if none does."""
    groups = (quantization.get("config_groups") or {}).values()
    sides = [group.get(f"{side}_activations") for group in groups for side in ("input", "output")]
    rounded = [each for each in (*sides, quantization.get("kv_cache_scheme")) if each]
    bits = [int(each.get("num_bits", 8)) for each in rounded] + [8] * bool(quantization.get("load_in_8bit"))
    return min(bits, default=0)


def _compressed_tensors(quantization: Mapping[str, Any]) -> Callable[[str, bool], Scheme]:
    groups = list((quantization.get("config_groups") or {}).values())
    schemes: list[Scheme] = []
    for group in groups:
        name = group.get("format") or quantization.get("format")
        if name not in LAYOUTS:
            raise ValueError(f"compressed-tensors format {name}")
        schemes.append((name, LAYOUTS[name], group))
    return partial(_in_groups, groups, schemes, quantization.get("ignore") or [])


def _in_groups(
    groups: list[Mapping[str, Any]], schemes: list[Scheme], ignore: list[str], name: str, _in_block: bool
) -> Scheme:
    if any(_targets(name, target) for target in ignore):
        return PLAIN
    targets = [
        (target, scheme) for group, scheme in zip(groups, schemes, strict=True) for target in group.get("targets", ())
    ]
    return best_target(name, targets) or PLAIN


def best_target(name: str, targets: Iterable[tuple[str, T]]) -> T | None:
    """Return what belongs to the target of `config_groups` that names a layer most closely.
    A name comes before a pattern, a pattern before the class `Linear`; ties go to the first.
    """
    ranked = [(rank, each) for target, each in targets if (rank := _rank(name, target)) is not None]
    return min(ranked, key=itemgetter(0))[1] if ranked else None


def _targets(name: str, target: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else name == target


def _rank(name: str, target: str) -> int | None:
    if _targets(name, target):
        return 1 if target.startswith("re:") else 0
    return 2 if target == "Linear" else None


def _gptq(quantization: Mapping[str, Any]) -> Callable[[str, bool], Scheme]:
    def scheme(name: str, in_block: bool) -> Scheme:
        if not in_block and not quantization.get("lm_head"):
            return PLAIN
        words = dict(quantization)
        for pattern, change in (quantization.get("dynamic") or {}).items():
            if re.match(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, name):
                if pattern.startswith("-:"):
                    return PLAIN
                words |= change
                break
        return "gptq", expected_tensors.gptq, words

    return scheme


def _awq(quantization: Mapping[str, Any]) -> Callable[[str, bool], Scheme]:
    if quantization.get("version", "gemm").lower() != "gemm":
        raise ValueError(f"AWQ version {quantization['version']}")
    kept = quantization.get("modules_to_not_convert") or []

    def scheme(name: str, in_block: bool) -> Scheme:
        return (
            PLAIN if not in_block or any(word in name for word in kept) else ("awq", expected_tensors.awq, quantization)
        )

    return scheme


def _bitsandbytes(quantization: Mapping[str, Any]) -> Callable[[str, bool], Scheme]:
    kept = quantization.get("llm_int8_skip_modules")
    layout = (
        expected_tensors.bitsandbytes_4bit if quantization.get("load_in_4bit") else expected_tensors.bitsandbytes_8bit
    )

    def scheme(name: str, in_block: bool) -> Scheme:
        if not in_block and (kept is None or name == "lm_head"):
            return PLAIN
        skipped = any(re.match(word, name) or name.endswith(word) for word in kept or ())
        return PLAIN if skipped else ("bitsandbytes", layout, quantization)

    return scheme
