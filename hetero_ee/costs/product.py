"""Compute the matrix products of a block, and the bytes of the tensors that they read."""

from typing import NamedTuple

from hetero_ee.layers.tensors import MATRIX_LAYOUTS, TensorRole, TensorSpec, is_in_rows
from hetero_ee.weights.model_weights import is_quantized
from hetero_ee.weights.rows import row_sizes
from hetero_ee.weights.tiles import region_bytes
from hetero_ee_profiles.hardware import DeviceTimes

FLOAT_BYTES = 4
VOCABULARY_LAYOUT = "int8"  # layout of the embedding, the head, exit maps and judges


class Product(NamedTuple):
    """One matrix product: y (m, n_rows) = x (m, n_columns) W^T."""

    layout: str
    n_rows: int
    n_columns: int

    @property
    def n_bytes(self) -> int:
        return sum(region_bytes(*self))

    def seconds(self, times: DeviceTimes, m: int) -> float:
        """Return the seconds that a device needs for m tokens."""
        return times.matmul_s(*self, m)


def stored_layout(tensor: TensorSpec) -> str:
    """Return the layout of a matrix in a store: 8 bits for the vocabulary, 4 bits unless its role says otherwise."""
    return VOCABULARY_LAYOUT if tensor.role is TensorRole.VOCABULARY else MATRIX_LAYOUTS.get(tensor.role, "int4")


def is_multiplied(role: TensorRole) -> bool:
    """Return whether a product reads all of a tensor of this role. Rows of neurons are read one by one instead."""
    return is_quantized(role) and not is_in_rows(role)


def tensor_product(tensor: TensorSpec) -> Product:
    n_rows, n_columns = tensor.shape
    return Product(stored_layout(tensor), n_rows, n_columns)


def tensor_bytes(tensor: TensorSpec) -> int:
    """Return the bytes of a tensor in memory, which are the same on every device."""
    if not is_quantized(tensor.role):
        return FLOAT_BYTES * tensor.n_elements
    if is_in_rows(tensor.role):
        return sum(row_sizes(*tensor.shape))
    return tensor_product(tensor).n_bytes


def exit_map_products(hidden_size: int, rank: int) -> tuple[Product, ...]:
    """Return the products of an exit map: none for rank 0, one for full rank, else two of low rank."""
    if not rank:
        return ()
    if rank == hidden_size:
        return (Product(VOCABULARY_LAYOUT, hidden_size, hidden_size),)
    return Product(VOCABULARY_LAYOUT, rank, hidden_size), Product(VOCABULARY_LAYOUT, hidden_size, rank)
