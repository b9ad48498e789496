"""Checkpoints in bitsandbytes' 4 bits, written tensor by tensor without bitsandbytes."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import edit_config

FILE = "model.safetensors"
NF4 = torch.tensor(  # arXiv 2305.14314, appendix E
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
FP4 = torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
TABLES = {"nf4": NF4, "fp4": torch.cat([FP4, -FP4])}
NESTED_MAP = torch.linspace(-1, 1, 256).sign() * torch.linspace(-1, 1, 256).square()  # finer near 0, as theirs is
NESTED_BLOCK = 256


def to_four_bits(
    folder: Path, kind: str, block_size: int, nested: bool, storage: torch.dtype, kept: Collection[str]
) -> dict[str, Tensor]:
    """Quantizes the linear layers of a checkpoint of floats in place, but for the head and names that hold one of
    `kept`. Returns the fp32 values that each one then has.
    """
    tensors, values = load_file(folder / FILE), {}
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and not any(part in name for part in ("embed", "lm_head", *kept)):
            saved, values[name] = four_bits(name, weight, kind, block_size, nested)
            saved[name] = saved[name].flatten().view(storage).view(-1, 1)
            tensors |= saved
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    edit_config(folder, quantization_config=quantization_config(kind, nested))
    return values


def quantization_config(kind: str, nested: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": None,
    }


def four_bits(name: str, weight: Tensor, kind: str, block_size: int, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one matrix, and its values as these tensors have them."""
    table, flat = TABLES[kind], weight.float().flatten()
    n_blocks = -(-len(flat) // block_size)
    blocks = torch.nn.functional.pad(flat, (0, n_blocks * block_size - len(flat))).view(n_blocks, block_size)
    absmax = blocks.abs().amax(1)
    codes = (blocks[:, :, None] / absmax[:, None, None] - table).abs().argmin(-1).to(torch.uint8)
    state = {"quant_type": kind, "blocksize": block_size, "dtype": "bfloat16", "shape": list(weight.shape)}
    saved = {name + ".quant_map": table.clone(), name + ".absmax": absmax}
    if nested:
        saved[name + ".absmax"], outer, absmax, offset = nested_absmax(absmax)
        saved |= {name + ".nested_absmax": outer, name + ".nested_quant_map": NESTED_MAP.clone()}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    pairs = torch.nn.functional.pad(codes.flatten()[: len(flat)], (0, len(flat) % 2)).view(-1, 2)
    saved[name] = (pairs[:, :1] << 4) | pairs[:, 1:]
    saved[f"{name}.quant_state.bitsandbytes__{kind}"] = state_tensor(state)
    values = (table[codes.int()] * absmax[:, None]).flatten()[: len(flat)].view(weight.shape)
    return saved, values


def nested_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Bytes, their scales, what both make of absmax, and the mean that was taken off first."""
    offset = float(absmax.mean())
    scales = torch.stack([(part - offset).abs().amax() for part in absmax.split(NESTED_BLOCK)])
    each = scales.repeat_interleave(NESTED_BLOCK)[: len(absmax)]
    codes = ((absmax - offset)[:, None] / each[:, None] - NESTED_MAP).abs().argmin(-1)
    return codes.to(torch.uint8), scales, NESTED_MAP[codes] * each + offset, offset


def state_tensor(state: Any) -> Tensor:
    """JSON (or the bytes given) as bitsandbytes hides it in a tensor."""
    data = state if isinstance(state, bytes) else json.dumps(state).encode()
    return torch.tensor(list(data), dtype=torch.uint8)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors of the checkpoint."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def edit_state(folder: Path, name: str, **changes: Any) -> None:
    """Changes fields of the matrix's state; None removes one."""

    def change(tensors: dict[str, Tensor]) -> None:
        [key] = [key for key in tensors if key.startswith(f"{name}.quant_state.")]
        state = json.loads(bytes(tensors[key].tolist())) | changes
        tensors[key] = state_tensor({field: value for field, value in state.items() if value is not None})

    edit(folder, change)
