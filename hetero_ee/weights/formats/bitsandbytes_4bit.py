"""Matrices that bitsandbytes saved in 4 bits, read without bitsandbytes.

A matrix `X.weight` (N, K) is cut, row by row, into blocks of adjacent weights: W = absmax[block] x quant_map[code]. The
checkpoint holds `X.weight` (packed codes), `.absmax`, `.quant_map` and `.quant_state.bitsandbytes__nf4` or `fp4` (JSON
as bytes). With double quantization absmax is in bytes: absmax = nested_quant_map[byte] x nested_absmax of its block +
nested_offset.
"""

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import shown
from hetero_ee.models.saved_format import FOUR_BIT_TYPES
from hetero_ee.weights.blocks import Blocks, RowBlocks
from hetero_ee.weights.formats.saved_matrix import RawTensors
from hetero_ee.weights.quantizers import table_codebook, unpacked
from hetero_ee.weights.tiles import TILE_COLUMNS
from hetero_ee_profiles.records import from_json

BLOCK_SIZES = tuple(2**power for power in range(5, 13))  # weights per absmax; also absmax values per nested absmax
STATE_SUFFIXES = {f".quant_state.bitsandbytes__{kind}": kind for kind in FOUR_BIT_TYPES}
PLAIN_SUFFIXES, NESTED_SUFFIXES = (".absmax", ".quant_map"), (".nested_absmax", ".nested_quant_map")
SUFFIXES = (*STATE_SUFFIXES, *PLAIN_SUFFIXES, *NESTED_SUFFIXES)  # of tensors that belong to a matrix
STORAGE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # types that packed bytes may be saved as
COMPUTE_TYPES = ("float32", "float16", "bfloat16")
MAX_STATE_BYTES = 4096  # published ones have 80 to 200
MAX_OFFSET = 1e30  # far above any absmax, and sums with it stay finite
CHUNK_ELEMENTS = 2**16  # weights unpacked at a time: whole blocks of any size


@dataclass(frozen=True, slots=True)
class QuantState:
    """The quantization state that bitsandbytes saves with a matrix."""

    quant_type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NestedQuantState(QuantState):
    """The quantization state of a matrix whose absmax is quantized as well."""

    nested_blocksize: int
    nested_dtype: str
    nested_offset: float


@dataclass(frozen=True, slots=True)
class FourBitMatrix:
    """A matrix in bitsandbytes' 4-bit format, with checked headers and quantization state."""

    name: str
    shape: tuple[int, int]
    state: QuantState
    tensors: RawTensors

    @property
    def tensor_names(self) -> Set[str]:
        return {self.name, *(self.name + suffix for suffix in SUFFIXES)}

    @property
    def n_elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def n_blocks(self) -> int:
        return -(-self.n_elements // self.state.blocksize)

    def dequantize(self) -> Tensor:
        """Return the matrix as fp32 (N, K), bit-equal to bitsandbytes' result in fp32."""
        table, absmax = self.table(), self.absmax()
        values = torch.empty(self.n_elements)
        for first, codes in self._code_chunks():
            scales = absmax[first // self.state.blocksize : (first + CHUNK_ELEMENTS) // self.state.blocksize]
            scales = scales.repeat_interleave(self.state.blocksize)[: len(codes)]
            torch.mul(table[codes.int()], scales, out=values[first : first + len(codes)])
        return values.view(self.shape)

    def table(self) -> Tensor:
        return self._map(".quant_map")

    def absmax(self) -> Tensor:
        """Return the largest magnitude of each block, fp32 (n_blocks,)."""
        found = self.tensors.read(self.name + ".absmax")
        if isinstance(self.state, NestedQuantState):
            outer = self.tensors.read(self.name + ".nested_absmax")
            self._refuse_non_finite(outer, ".nested_absmax")
            outer = outer.repeat_interleave(self.state.nested_blocksize)[: self.n_blocks]
            found = self._map(".nested_quant_map")[found.int()] * outer + self.state.nested_offset
        self._refuse_non_finite(found, ".absmax")
        return found

    def blocks(self, *, in_8_bits: bool) -> RowBlocks | None:
        """Return blocks of 32 columns; None if one would span two of the file's, or int8 can't tell two codes apart."""
        codebook, (n_rows, n_columns) = table_codebook(self.table()), self.shape
        if codebook is None or n_columns % TILE_COLUMNS:
            return None
        codes = torch.empty(self.n_elements, dtype=torch.uint8)
        for first, chunk in self._code_chunks():
            codes[first : first + len(chunk)] = codebook.codes[chunk.int()]
        scales = self.absmax().repeat_interleave(self.state.blocksize // TILE_COLUMNS) * codebook.unit
        scales = scales[: n_rows * n_columns // TILE_COLUMNS].view(n_rows, -1)
        blocks = Blocks(codes.view(self.shape), scales, codebook.entries)
        return RowBlocks(n_rows, blocks.rows, lambda rows: self.dequantize()[rows])

    def _code_chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield chunks of the unpacked codes, uint8, each with the index of its first code."""
        packed = self.tensors.read(self.name).view(torch.uint8).flatten()
        for first in range(0, self.n_elements, CHUNK_ELEMENTS):
            chunk = packed[first // 2 : (first + CHUNK_ELEMENTS) // 2]
            yield first, unpacked(chunk)[: self.n_elements - first]

    def _map(self, suffix: str) -> Tensor:
        values = self.tensors.read(self.name + suffix)
        if not (values.abs() <= 1).all() or not values.any():  # NaN is not <= 1
            raise self.tensors.failure(self.name + suffix, "is not a table of values from -1 to 1")
        return values

    def _refuse_non_finite(self, values: Tensor, suffix: str) -> None:
        finite = torch.isfinite(values)
        if not finite.all():
            index = int((~finite).nonzero()[0])
            raise self.tensors.failure(self.name + suffix, f"gives {values[index].item()} at [{index}]")


def four_bit_matrix(tensors: RawTensors, name: str, shape: tuple[int, int]) -> FourBitMatrix | None:
    """Return the matrix called `name`, of the shape in config.json, or None if it was not saved in 4 bits.

    Raises:
        CheckpointError: if the matrix's tensors or its state are inconsistent.
    """
    if not {name + suffix for suffix in SUFFIXES} & tensors.names:
        return None
    states = [suffix for suffix in STATE_SUFFIXES if name + suffix in tensors.names]
    if len(states) != 1:
        raise tensors.failure(name, f"has {len(states)} tensors *.quant_state.bitsandbytes__nf4 or __fp4, expected one")
    nested_names = {name + suffix for suffix in NESTED_SUFFIXES}
    is_nested = bool(nested_names & tensors.names)
    needed = {name, *(name + suffix for suffix in PLAIN_SUFFIXES), *(nested_names if is_nested else ())}
    for missing in sorted(needed - tensors.names):
        raise tensors.failure(missing, "is missing")
    try:
        state = _read_state(tensors, name + states[0], NestedQuantState if is_nested else QuantState)
        _check_state(state, STATE_SUFFIXES[states[0]], shape)
    except ValueError as error:
        raise tensors.failure(name + states[0], f"can't be used ({error})") from error
    matrix = FourBitMatrix(name, shape, state, tensors)
    _check_headers(matrix)
    return matrix


def _read_state(tensors: RawTensors, name: str, kind: type[QuantState]) -> QuantState:
    """Parse the JSON object in the bytes of a tensor. Raises ValueError."""
    stored_type, shape = tensors.header(name)
    if stored_type != "U8" or math.prod(shape) > MAX_STATE_BYTES:
        found = f"type {stored_type} and shape {shown(list(shape))}"
        raise ValueError(f"it has {found}, expected at most {MAX_STATE_BYTES} bytes")
    return from_json(kind, bytes(tensors.read(name).flatten().tolist()).decode())


def _check_state(state: QuantState, quant_type: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a field that contradicts the others, or that bitsandbytes never writes."""
    choices: dict[str, tuple[Any, ...]] = {
        "quant_type": (quant_type,),
        "shape": (shape,),
        "dtype": COMPUTE_TYPES,
        "blocksize": BLOCK_SIZES,
    }
    if isinstance(state, NestedQuantState):
        choices |= {"nested_blocksize": BLOCK_SIZES, "nested_dtype": ("float32",)}
        if abs(state.nested_offset) > MAX_OFFSET:
            raise ValueError(f"nested_offset is {state.nested_offset:g}, expected a number up to {MAX_OFFSET:g}")
    for field, allowed in choices.items():
        value = getattr(state, field)
        if value not in allowed:
            raise ValueError(f"{field} is {shown(value)}, expected {' or '.join(map(str, allowed))}")


def _check_headers(matrix: FourBitMatrix) -> None:
    """Check that every tensor has the type and size that the state implies. Raises CheckpointError."""
    tensors, n_bytes = matrix.tensors, -(-matrix.n_elements // 2)
    kind, shape = tensors.header(matrix.name)
    if kind not in STORAGE_BYTES or math.prod(shape) * STORAGE_BYTES[kind] != n_bytes:
        raise tensors.failure(
            matrix.name, f"has type {kind} and shape {shown(list(shape))}, expected {n_bytes} bytes of packed codes"
        )
    state, expected = matrix.state, {".quant_map": ("F32", 16), ".absmax": ("F32", matrix.n_blocks)}
    if isinstance(state, NestedQuantState):
        expected[".absmax"] = ("U8", matrix.n_blocks)
        expected[".nested_quant_map"] = ("F32", 256)
        expected[".nested_absmax"] = ("F32", -(-matrix.n_blocks // state.nested_blocksize))
    for suffix, (its_kind, length) in expected.items():
        tensors.require(matrix.name + suffix, (its_kind,), (length,))
