"""Checkpoints in GPTQ, AWQ, compressed-tensors, FP8 and 4 bits, packed tensor by tensor from the published layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bitsandbytes_files import FILE, to_four_bits
from tests.families import edit_config

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight numbers lies in each nibble, the lowest first
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3_LARGEST = 448.0


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A format, and what it leaves to choose."""

    method: str
    bits: int = 4
    group_size: int = 32  # -1: a whole row
    symmetric: bool = True
    reordered: bool = False
    version: int = 1  # of GPTQ
    block: tuple[int, int] | None = None  # of FP8
    scale_type: torch.dtype = torch.float16
    by: str = "gptq"  # what wrote FP8: "fp8" or "compressed-tensors"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FourBits:
    """bitsandbytes' format, and what it leaves to choose."""

    kind: str = "nf4"  # or "fp4"
    block_size: int = 64
    nested: bool = False
    storage: torch.dtype = torch.uint8
    reordered: bool = False


Format = Packing | FourBits


def pack_checkpoint(folder: Path, packing: Format, *, kept: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Quantizes the linear layers of a checkpoint of floats in place, but for the head and names that hold one of
    `kept`. Returns the fp32 values that each one then has.
    """
    if isinstance(packing, FourBits):
        return to_four_bits(folder, packing.kind, packing.block_size, packing.nested, packing.storage, kept)
    tensors, values = load_file(folder / FILE), {}
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and not any(part in name for part in ("embed", "lm_head", *kept)):
            del tensors[name]
            saved, values[name] = PACKERS[packing.method](weight.float(), packing)
            tensors |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in saved.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata={"format": "pt"})
    edit_config(folder, quantization_config=CONFIGS[packing.method](packing))
    return values


def grouped(weight: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rounded to nearest: codes (N, K), scales and zeros (N, G), groups (K,), and what they mean, fp32 (N, K)."""
    n_rows, n_columns = weight.shape
    size = n_columns if packing.group_size == -1 else packing.group_size
    groups = torch.arange(n_columns) // size
    if packing.reordered:
        groups = groups[torch.randperm(n_columns, generator=torch.Generator().manual_seed(packing.seed))]
    n_groups, largest = int(groups.max()) + 1, 2**packing.bits - 1
    scales, zeros = torch.empty(n_rows, n_groups), torch.full((n_rows, n_groups), (largest + 1) // 2)
    for group in range(n_groups):
        low, high = torch.aminmax(weight[:, groups == group], dim=1)
        if packing.symmetric:
            scales[:, group] = 2 * torch.maximum(low.abs(), high.abs()) / largest
        else:
            low, high = low.clamp(max=-1e-3), high.clamp(min=1e-3)  # 0 lies inside, so that zero points are codes
            scales[:, group] = (high - low) / largest
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, largest)
    scales = scales.to(packing.scale_type).float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, largest).to(torch.uint8)
    return codes, scales, zeros, groups, (codes.float() - zeros[:, groups]) * scales[:, groups]


def packed(numbers: Tensor, bits: int) -> Tensor:
    """(a, b) -> int32 (a, b * bits / 32), the first in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).view(len(numbers), -1, each)
    words = (padded << (torch.arange(each) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, groups, values = grouped(weight, packing)
    stored = zeros - (1 if packing.version == 1 else 0)
    saved = {
        ".qweight": packed(codes, packing.bits).T,
        ".qzeros": packed(stored.T, packing.bits),
        ".scales": scales.T.to(packing.scale_type),
        ".g_idx": groups.int(),
    }
    return saved, values


def awq(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, _, values = grouped(weight, packing)

    def in_order(numbers: Tensor) -> Tensor:
        return packed(numbers.T.reshape(numbers.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1), 4)

    saved = {".qweight": in_order(codes), ".qzeros": in_order(zeros), ".scales": scales.T.to(packing.scale_type)}
    return saved, values


def pack_quantized(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, groups, values = grouped(weight, packing)
    saved = {
        ".weight_packed": packed(codes, packing.bits),
        ".weight_scale": scales.to(packing.scale_type),
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not packing.symmetric:
        saved[".weight_zero_point"] = packed(zeros.T, packing.bits).T
    if packing.reordered:
        saved[".weight_g_idx"] = groups.int()
    return saved, values


def int_quantized(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, _, values = grouped(weight, packing)
    saved = {".weight": (codes.int() - 128).to(torch.int8), ".weight_scale": scales.to(packing.scale_type)}
    if not packing.symmetric:
        saved[".weight_zero_point"] = (zeros - 128).to(torch.int8)
    return saved, values


def mxfp4(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.view(len(weight), -1, 32)
    exponents = (torch.frexp(groups.abs().amax(-1)).exponent - 3).clamp(-127, 127)  # of 4, FP4's largest octave
    units = torch.ldexp(torch.ones(exponents.shape), exponents)[..., None]
    codes = ((groups / units)[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    values = (FP4[codes.int()] * units).flatten(1)
    pairs = codes.flatten(1).view(len(weight), -1, 2)
    saved = {".weight_packed": pairs[..., 0] | pairs[..., 1] << 4, ".weight_scale": (exponents + 127).to(torch.uint8)}
    return saved, values


def pack_experts(folder: Path) -> dict[str, Tensor]:
    """Packs a gpt-oss checkpoint's experts in MXFP4 in place. Returns the values that each of their tensors then has,
    (experts, in, out) as transformers has them."""
    tensors, values = load_file(folder / FILE), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name).float().transpose(1, 2)
        n_experts, n_rows, n_columns = weight.shape
        saved, dense = mxfp4(weight.reshape(-1, n_columns), Packing(method="mxfp4"))
        values[name] = dense.view(weight.shape).transpose(1, 2).contiguous()
        tensors[f"{name}_blocks"] = saved[".weight_packed"].reshape(n_experts, n_rows, n_columns // 32, 16)
        tensors[f"{name}_scales"] = saved[".weight_scale"].view(n_experts, n_rows, n_columns // 32)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return values


def fp8(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    n_rows, n_columns = weight.shape
    rows, columns = packing.block or (n_rows if packing.group_size == -1 else 1, n_columns)
    padded = torch.nn.functional.pad(weight, (0, -n_columns % columns, 0, -n_rows % rows))
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    scales = (blocks.abs().amax((1, 3)) / E4M3_LARGEST).to(packing.scale_type).float()
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n_rows, :n_columns]
    codes = (weight / each).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    if packing.block is None and packing.group_size == -1:
        scales = scales.view(1)
    suffix = ".weight_scale_inv" if packing.by == "fp8" else ".weight_scale"
    return {".weight": codes, suffix: scales.to(packing.scale_type)}, codes.float() * each


PACKERS: dict[str, Callable[[Tensor, Packing], tuple[dict[str, Tensor], Tensor]]] = {
    "gptq": gptq,
    "awq": awq,
    "pack-quantized": pack_quantized,
    "int-quantized": int_quantized,
    "mxfp4-pack-quantized": mxfp4,
    "fp8": fp8,
}


def gptq_config(packing: Packing) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": packing.bits,
        "group_size": packing.group_size,
        "sym": packing.symmetric,
        "desc_act": packing.reordered,
        "checkpoint_format": "gptq" if packing.version == 1 else "gptq_v2",
        "pack_dtype": "int32",
        "lm_head": False,
        "meta": {"quantizer": ["tests"], "damp_percent": 0.05, "static_groups": False},
    }


def awq_config(packing: Packing) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": packing.bits,
        "group_size": packing.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def compressed_config(packing: Packing) -> dict[str, Any]:
    kind, number = packing.method, "int"
    weights: dict[str, Any] = {"num_bits": packing.bits, "symmetric": packing.symmetric, "dynamic": False}
    if packing.method == "fp8":
        kind, number = "float-quantized", "float"
        weights |= {"num_bits": 8, "strategy": "tensor" if packing.group_size == -1 else "channel"}
        if packing.block:
            weights |= {"strategy": "block", "block_structure": list(packing.block)}
    elif packing.group_size == -1:
        weights |= {"strategy": "channel", "group_size": None}
    else:
        weights |= {"strategy": "group", "group_size": packing.group_size}
    number = "float" if packing.method.startswith("mxfp4") else number
    weights |= {"type": number, "actorder": "group" if packing.reordered else None, "observer": "minmax"}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "kv_cache_scheme": None,
    }


def fp8_config(packing: Packing) -> dict[str, Any]:
    if packing.by != "fp8":
        return compressed_config(packing)
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(packing.block) if packing.block else None,
        "modules_to_not_convert": ["lm_head"],
    }


CONFIGS: dict[str, Callable[[Packing], dict[str, Any]]] = {
    "gptq": gptq_config,
    "awq": awq_config,
    "pack-quantized": compressed_config,
    "int-quantized": compressed_config,
    "mxfp4-pack-quantized": compressed_config,
    "fp8": fp8_config,
}
