"""The arena: buffers at fixed addresses in which a GPU's layers work, and tables that the layers read.

One arena serves all segments of a device, as segments never run at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.kv.devices import GpuCache
from hetero_ee.layers.ops import DELTA, NORMED
from hetero_ee.layers.per_layer import EMBEDDED, TABLE_ROWS, LayerTableSpec
from hetero_ee.layers.rope import RopeSpec
from hetero_ee.layers.state import RecurrentState
from hetero_ee.models.blocks import layer_buffers, layer_states
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import query_factors
from hetero_ee_kernels.delta_state import DeltaRows, earlier_rows
from hetero_ee_kernels.pages import FEW_ROWS, workspace_size
from hetero_ee_kernels.rope_table import rope_table

MAX_ROWS = 16  # most rows of a decode pass; each number of rows has a CUDA graph of its own
HIDDEN = "hidden"  # the buffer of the hidden states between a segment's blocks


@dataclass(frozen=True, slots=True)
class GpuRows:
    """The tokens of a pass in buffers at fixed addresses, int32 (m,) each."""

    slots: Tensor  # slots of the KV cache
    positions: Tensor
    may_skip: Tensor  # 0 for tokens that need all neurons
    earlier: Tensor  # the previous row of the same sequence, or -1; only if the model has recurrent layers
    paths: Tensor | None = None  # (m, 1 + n), see hetero_ee_kernels.pages; None if the rows are no tree of drafts
    inputs: Any = None  # see Rows
    some_may_skip: bool = True  # kernel launches must not depend on this

    @property
    def in_slots(self) -> DeltaRows:
        """The tokens as kernels of recurrent layers read them."""
        return DeltaRows(self.slots, self.positions, self.earlier)


class Arena:
    """Buffers for segments whose keys and values are in `cache`, or in another cache with the same context and heads.

    Args:
        n_rows: most tokens of one pass: MAX_ROWS, or a whole chunk of a prompt. More tokens need further passes.
    """

    def __init__(self, spec: ModelSpec, cache: GpuCache, n_rows: int = MAX_ROWS) -> None:
        self.n_rows = n_rows
        self.device = cache.device
        self.rope_tables = _rope_tables(spec, cache.max_tokens, self.device)  # rotary angles, if any
        self.query_factors = _query_factors(spec, cache.max_tokens, self.device)
        self.workspace = _attention_workspace(spec, cache.n_parts, min(n_rows, FEW_ROWS), self.device)
        self._table, self._hidden_size = spec.layer_table, spec.hidden_size
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # recorded launches may still use them
        sizes = dict.fromkeys((NORMED, HIDDEN, DELTA), spec.hidden_size)
        for name, width in (sizes | layer_buffers(spec)).items():
            self.rows(name, n_rows, width)
        slots, positions, may_skip, earlier = (
            torch.zeros(n_rows, dtype=torch.int32, device=self.device) for _ in range(4)
        )
        self._rows = GpuRows(slots, positions, may_skip, earlier)
        self._paths = torch.zeros(n_rows, 1 + MAX_ROWS, dtype=torch.int32, device=self.device)
        self.is_tree = False  # whether the pass copied by `place` is a tree of drafts
        self._is_recurrent = any(isinstance(state, RecurrentState) for state in layer_states(spec))
        # Fields of NeuronCounts. The device counts the neurons used and predicted, the host all neurons.
        self.n_used, self.n_predicted = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        self.n_neurons = 0

    def rows(self, name: str, m: int, width: int) -> Tensor:
        """Return m rows of the named buffer, fp32 (m, width), contiguous, at the same address each time."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < m * width:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[name] = torch.zeros(max(m, MAX_ROWS) * width, device=self.device)
        return buffer[: m * width].view(m, width)

    def tokens(self, m: int) -> GpuRows:
        """Return the first m tokens of the pass that was copied by `place`."""
        found, table = self._rows, self._table
        inputs = None if table is None else self._inputs(m, table)
        paths = self._paths[:m] if self.is_tree else None
        return GpuRows(found.slots[:m], found.positions[:m], found.may_skip[:m], found.earlier[:m], paths, inputs)

    def place_inputs(self, embedded: Tensor, table_rows: Tensor) -> None:
        """Copy what layers read of a pass's tokens from the host's memory to the GPU."""
        assert self._table is not None, "a layer reads tokens"
        for ours, theirs in zip(self._inputs(len(embedded), self._table), (embedded, table_rows), strict=True):
            ours.copy_(theirs)

    def _inputs(self, m: int, table: LayerTableSpec) -> tuple[Tensor, Tensor]:
        return self.rows(EMBEDDED, m, self._hidden_size), self.rows(TABLE_ROWS, m, table.width)

    def place(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        may_skip: Sequence[bool] | None = None,
        paths: Sequence[Sequence[int]] = (),
    ) -> None:
        """Copy the slots, positions and paths of a pass's tokens to the GPU. The host does not wait for the copy.

        Args:
            may_skip: see Batch; None if FFNs are not neuron-major.
            paths: see Batch.
        """
        self.is_tree = bool(paths)
        some = self.tokens(len(slots))
        columns = [(some.slots, slots), (some.positions, positions)]
        if may_skip is not None:
            columns.append((some.may_skip, may_skip))
        if self._is_recurrent:
            columns.append((some.earlier, earlier_rows(slots)))
        pinned: dict[str, Any] = {"dtype": torch.int32, "pin_memory": self.device.type == "cuda"}
        numbers = torch.tensor([values for _, values in columns], **pinned)
        for (column, _), values in zip(columns, numbers, strict=True):
            column.copy_(values, non_blocking=True)
        if paths:
            branches = (position + 1 - len(path) for path, position in zip(paths, positions, strict=True))
            rows = [[at, *path, *[0] * (MAX_ROWS - len(path))] for at, path in zip(branches, paths, strict=True)]
            self._paths[: len(paths)].copy_(torch.tensor(rows, **pinned), non_blocking=True)


def _rope_tables(spec: ModelSpec, n_positions: int, device: Any) -> dict[RopeSpec | None, Any]:
    return {None: None} | {
        rope: rope_table(rope.inverse_frequencies(n_positions), rope.scaling.magnitude, n_positions, device)
        for rope in spec.ropes
    }


def _attention_workspace(spec: ModelSpec, n_parts: int, n_rows: int, device: Any) -> Tensor:
    """Allocate a workspace that is large enough for each layer's attention."""
    sizes = (workspace_size(n_rows * each.n_heads * n_parts, each.attended_dim) for each in spec.attentions)
    return torch.empty(max(sizes, default=0), device=device)


def _query_factors(spec: ModelSpec, n_positions: int, device: Any) -> dict[tuple[float, int] | None, Any]:
    positions = np.arange(n_positions)[:, None]
    return {None: None} | {
        growth: torch.from_numpy(query_factors(growth, positions)).to(device) for growth in spec.query_growths
    }
