"""Declare a block's parameters: their names, their shapes and their use."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class TensorRole(Enum):
    """The use of a tensor, which decides how it may be stored."""

    MATRIX = "matrix"  # multiplies hidden states; quantized
    # The same in a layout that the model's file asks for. The values are the names of the layouts.
    MATRIX_ZEROS = "int4 zeros"
    MATRIX_5 = "int5"
    MATRIX_5_ZEROS = "int5 zeros"
    MATRIX_6 = "int6"
    MATRIX_8 = "int8"
    NEURONS = "neurons"  # a row per neuron of a neuron-major FFN; quantized row by row
    FIRST_ROWS = "first rows"  # the same, for the matrix that decides which neurons are active
    VOCABULARY = "vocabulary"  # embedding or head: a row per token; quantized at a width of its own
    POSITIONS = "positions"  # learned position table; kept in full precision
    VECTOR = "vector"  # norms and biases; kept in full precision


# Layouts of matrices for any quantizer.
MATRIX_LAYOUTS = {role: role.value for role in TensorRole if role.name.startswith("MATRIX_")}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the model: its name inside this engine, its role and its shape. Matrices are (out, in)."""

    name: str
    role: TensorRole
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def is_in_rows(role: TensorRole) -> bool:
    """Return whether tensors with this role are stored as one row per neuron."""
    return role in (TensorRole.NEURONS, TensorRole.FIRST_ROWS)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Collects the tensors of one block by their short names.

    Args:
        prefix: beginning of the tensors' names in the model.
        role_of: returns a matrix's role by the matrix's name in the model.
    """

    prefix: str
    role_of: Callable[[str], TensorRole]
    declared: dict[str, TensorSpec] = field(default_factory=dict)

    def matrix(
        self, short: str, n_rows: int, n_columns: int, *, bias: bool = False, role: TensorRole | None = None
    ) -> None:
        """Declare a matrix and, if `bias` is set, a bias with a value for each of its rows."""
        name = f"{self.prefix}.{short}"
        self.declared[short] = TensorSpec(name, role or self.role_of(name), (n_rows, n_columns))
        if bias:
            self.vector(f"{short}_bias", n_rows)

    def vector(self, short: str, *shape: int) -> None:
        """Declare a norm's scale, a bias or another small tensor that keeps full precision."""
        self.declared[short] = TensorSpec(f"{self.prefix}.{short}", TensorRole.VECTOR, shape)
