"""Peak rates of accelerators, the denominator of a model's utilisation.

Dense rates (no structured sparsity) from the vendors' data sheets; of several forms of a device, the SXM form.
"""

from __future__ import annotations

import re

import torch

# Tera operations per second, by words in the device's name and dtype of a matrix product. The first match counts.
_PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"float16": 2250.0, "tf32": 1100.0, "float32": 75.0},
    "H200 NVL": {"float16": 835.5, "tf32": 417.5, "float32": 60.0},
    "GH200": {"float16": 989.4, "tf32": 494.7, "float32": 66.9},
    "H200": {"float16": 989.4, "tf32": 494.7, "float32": 66.9},
    "H100 PCIe": {"float16": 756.0, "tf32": 378.0, "float32": 51.0},
    "H100 NVL": {"float16": 835.0, "tf32": 417.5, "float32": 60.0},
    "H100": {"float16": 989.4, "tf32": 494.7, "float32": 66.9},
    "H800 PCIe": {"float16": 756.0, "tf32": 378.0, "float32": 51.0},
    "H800": {"float16": 989.4, "tf32": 494.7, "float32": 66.9},
    "A100": {"float16": 312.0, "tf32": 156.0, "float32": 19.5},
    "A800": {"float16": 312.0, "tf32": 156.0, "float32": 19.5},
    "A30": {"float16": 165.0, "tf32": 82.0, "float32": 10.3},
    "A10": {"float16": 125.0, "tf32": 62.5, "float32": 31.2},
    "L40S": {"float16": 362.0, "tf32": 183.0, "float32": 91.6},
    "L40": {"float16": 181.0, "tf32": 90.5, "float32": 90.5},
    "L4": {"float16": 121.0, "tf32": 60.0, "float32": 30.3},
    "V100-PCIE": {"float16": 112.0, "float32": 14.0},
    "V100": {"float16": 125.0, "float32": 15.7},
    "T4": {"float16": 65.0, "float32": 8.1},
}


def peak_flops(device_name: str, dtype: torch.dtype, allow_tf32: bool = False) -> float | None:
    """Peak operations per second of a device.

    Args:
        device_name: from `torch.cuda.get_device_name`.
        dtype: of the model's matrix products.
        allow_tf32: whether products of float32 may be computed in TF32.

    Returns:
        Operations per second; None for a device or dtype that is not in the table, and for a MIG slice of a device.

    >>> peak_flops("NVIDIA H200", torch.bfloat16)
    989400000000000.0
    >>> peak_flops("AMD EPYC", torch.float32) is None
    True
    """
    found = (rates for name, rates in _PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name))
    rates = {} if " MIG " in device_name else next(found, {})  # a slice of a GPU has a part of its rate
    name = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}.get(dtype, "")
    if name == "bfloat16" and "tf32" in rates:  # from Ampere on, at the rate of float16
        name = "float16"
    if name == "float32" and allow_tf32 and "tf32" in rates:
        name = "tf32"
    return rates[name] * 1e12 if name in rates else None


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """`peak_flops` of a device of this process, with the present TF32 setting; None for a CPU."""
    if device.type != "cuda":
        return None
    # Not allow_tf32, which torch refuses to read if the newer setting is in use.
    allow_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_flops(torch.cuda.get_device_name(device), dtype, allow_tf32)
