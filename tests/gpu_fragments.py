"""Executes the text of matrix products for one warp, by the tables of fragments in the PTX manual ("Matrix multiply-
accumulate operation using mma instruction"): m16n8k32 and m8n8k16 with signed bytes."""

import re
from typing import Any

import numpy as np

MMA = re.compile(
    r"mma\.sync\.aligned\.m(\d+)n8k(\d+)\.row\.col\.s32\.s8\.s8\.s32 \{(.*?)\}, \{(.*?)\}, \{(.*?)\}, \{(.*?)\};"
)
N_LANES = 32


def run_warp(text: str, n_outputs: int, inputs: list[Any]) -> list[Any]:
    """Outputs $0.. as int32 (32,); inputs are the operands after them, each 32 words, one a lane."""
    registers = {
        f"${n_outputs + place}": np.asarray(words, np.int64).astype(np.int32) for place, words in enumerate(inputs)
    }
    for height, depth, *operands in MMA.findall(text):
        d, a, b, c = (names.split(", ") for names in operands)
        product = _operand(registers, a, int(height), int(depth), 4) @ _operand(registers, b, 8, int(depth), 4).T
        for place, name in enumerate(d):
            row, column = _places(int(height), place, 2)
            sums = registers[c[place]] + product[row, column + place % 2]
            registers[name] = sums.astype(np.int32)
    return [registers[f"${place}"] for place in range(n_outputs)]


def _operand(registers: dict[str, Any], names: list[str], height: int, depth: int, width: int) -> Any:
    """A, or B transposed: (height, depth) signed bytes from the lanes' words."""
    matrix = np.zeros((height, depth), np.int64)
    n_rows = height // 8  # of a lane
    for place, name in enumerate(names):
        signed = registers[name].view(np.int8).reshape(N_LANES, 4)
        for lane in range(N_LANES):
            first = lane % 4 * width + 16 * (place // n_rows)
            matrix[lane // 4 + 8 * (place % n_rows), first : first + 4] = signed[lane]
    return matrix


def _places(height: int, place: int, width: int) -> tuple[Any, Any]:
    """Rows and first columns of the lanes' sums."""
    lane = np.arange(N_LANES)
    return lane // 4 + 8 * (place // 2 if height > 8 else 0), lane % 4 * width
