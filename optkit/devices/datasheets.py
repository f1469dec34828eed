"""What devices can do by the makers' datasheets: bandwidth and dense matrix rates.

Rates are those with float32 sums if a datasheet tells two. Datasheets that give rates with 2:4
sparsity alone are halved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from optkit.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Device:
    """A roof: bytes and operations a second."""

    name: str
    bandwidth: float
    """Bytes per second of the main memory."""
    rates: Mapping[str, float]
    """Operations per second (a multiply and an add are two) of dense matrix products: fp32, tf32,
    bf16, fp16, int8, fp8.
    """
    memory_bytes: float
    source: str
    """Where the numbers are from: a datasheet, or how they were measured."""

    @property
    def wide(self) -> str:
        """Its 16-bit float: bf16 if it has it, else fp16; fp32 if it has neither."""
        return next(name for name in ("bf16", "fp16", "fp32") if name in self.rates)

    def rate(self, arithmetic: str) -> float:
        """Return the rate of a dtype; without one, that of its 16-bit float."""
        return self.rates.get(arithmetic) or self.rates[self.wide]


def rates_text(rates: Mapping[str, float]) -> str:
    """Return e.g. `TFLOP/s: fp32 66.9, bf16 989`; of slow devices in GFLOP/s."""
    scale, unit = (1e12, "TFLOP/s") if max(rates.values()) >= 1e13 else (1e9, "GFLOP/s")
    numbers = {name: rate / scale for name, rate in rates.items()}
    texts = (f"{name} {rate:,.3g}" if rate < 1e3 else f"{name} {rate:,.0f}" for name, rate in numbers.items())
    return f"{unit}: {', '.join(texts)}"


def _device(name: str, tb_per_s: float, memory_gb: float, source: str, **tera: float) -> Device:
    return Device(name, tb_per_s * 1e12, {key: value * 1e12 for key, value in tera.items()}, memory_gb * 1e9, source)


H200 = "https://www.nvidia.com/en-us/data-center/h200/"
H100 = "https://www.nvidia.com/en-us/data-center/h100/ and the H100 architecture whitepaper, table 2"
A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
ADA = "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"
HOPPER = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "int8": 1978.9, "fp8": 1978.9}
AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0, "int8": 624.0}
DEVICES: Mapping[str, Device] = {
    "b200": _device("NVIDIA B200 (HGX)", 7.7, 180, "https://www.nvidia.com/en-us/data-center/hgx/ "
                                                   "(sparse rates halved)",
                    fp32=75, tf32=1100, bf16=2250, fp16=2250, int8=4500, fp8=4500),
    "h200": _device("NVIDIA H200 SXM", 4.8, 141, f"{H200} (sparse rates halved)", **HOPPER),
    "h200-nvl": _device("NVIDIA H200 NVL", 4.8, 141, f"{H200} (sparse rates halved)",
                        fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, int8=1670.5, fp8=1670.5),
    "h100": _device("NVIDIA H100 SXM", 3.35, 80, H100, **HOPPER),
    "h100-pcie": _device("NVIDIA H100 PCIe", 2.0, 80, H100, fp32=51.2, tf32=378, bf16=756, fp16=756, int8=1513,
    fp8=1513),
    "a100-80gb": _device("NVIDIA A100 80GB SXM", 2.039, 80, A100, **AMPERE),
    "a100-80gb-pcie": _device("NVIDIA A100 80GB PCIe", 1.935, 80, A100, **AMPERE),
    "a100-40gb": _device("NVIDIA A100 40GB", 1.555, 40, "NVIDIA A100 architecture whitepaper, table 4", **AMPERE),
    "l40s": _device("NVIDIA L40S", 0.864, 48, "https://www.nvidia.com/en-us/data-center/l40s/",
                    fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, int8=733, fp8=733),
    "l4": _device("NVIDIA L4", 0.3, 24, "https://www.nvidia.com/en-us/data-center/l4/ (sparse rates halved)",
                  fp32=30.3, tf32=60, bf16=121, fp16=121, int8=242.5, fp8=242.5),
    "a10": _device("NVIDIA A10", 0.6, 24, "https://www.nvidia.com/en-us/data-center/products/a10-gpu/",
                   fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250),
    "t4": _device("NVIDIA T4", 0.32, 16, "https://www.nvidia.com/en-us/data-center/tesla-t4/", fp32=8.1,
    fp16=65, int8=130),
    "rtx4090": _device("NVIDIA GeForce RTX 4090", 1.008, 24, ADA,
                       fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, int8=660.6, fp8=330.3),
    "rtx3090": _device("NVIDIA GeForce RTX 3090", 0.936, 24, "NVIDIA GA102 architecture whitepaper v2, appendix A",
                       fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
    "mi300x": _device("AMD Instinct MI300X", 5.3, 192, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
                      fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, int8=2614.9, fp8=2614.9),
}  # fmt: skip
"""Name on the command line -> device."""
ALIASES = {"a100": "a100-80gb", "h100-sxm": "h100", "h200-sxm": "h200", "4090": "rtx4090", "3090": "rtx3090"}


def datasheet(name: str) -> Device:
    """Return a device of the table; raises UsageError with the nearest name, or all of them."""
    key = name.lower().replace("_", "-")
    found = DEVICES.get(ALIASES.get(key, key))
    if found is None:
        what, why = f"'{name}' is no device here and none of the table", "cpu, cuda and cuda:N are measured"
        hint = did_you_mean(key, [*DEVICES, *ALIASES]).strip()
        raise UsageError(what, where="--device", why=why, remedy=hint)
    return found


DRIVER_NAMES = {
    r"B200\b": "b200",
    r"H200 NVL\b": "h200-nvl",
    r"H200\b": "h200",
    r"H100 PCIe\b": "h100-pcie",
    r"H100 80GB HBM3\b": "h100",
    r"A100-SXM4-80GB\b": "a100-80gb",
    r"A100 80GB PCIe\b": "a100-80gb-pcie",
    r"A100-(SXM4|PCIE)-40GB\b": "a100-40gb",
    r"L40S\b": "l40s",
    r"L4\b": "l4",
    r"A10\b": "a10",
    r"T4\b": "t4",
    r"RTX 4090$": "rtx4090",
    r"RTX 3090$": "rtx3090",
    r"MI300X\b": "mi300x",
}
"""Pattern of what the driver calls a device -> its name in `DEVICES`."""


def datasheet_of(driver_name: str) -> Device | None:
    """Return the device of the table that the driver calls e.g. `NVIDIA H200`; None if none is."""
    found = next(
        (name for pattern, name in DRIVER_NAMES.items() if re.search(rf"(?:^|\s){pattern}", driver_name)), None
    )
    return DEVICES[found] if found else None
