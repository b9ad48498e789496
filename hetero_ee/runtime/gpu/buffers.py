"""What the segments of a GPU work in: buffers that stay where they are, and the table of rotary angles.

One serves all segments of a device, as they never run at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.rope import RopeSpec
from hetero_ee.models.spec import ModelSpec
from hetero_ee_kernels.pages import attention_workspace
from hetero_ee_kernels.rope_table import rope_table

MAX_ROWS = 16  # of a pass of decoding: each number of rows up to it has a graph of its own


@dataclass(frozen=True, slots=True)
class SegmentBuffers:
    """Every pass of m rows uses the first m of each."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    active: Tensor
    delta: Tensor
    slots: Tensor
    positions: Tensor
    may_skip: Tensor

    def first(self, m: int) -> "SegmentBuffers":
        return SegmentBuffers(*(getattr(self, name)[:m] for name in self.__slots__))


class SegmentRoom:
    """For segments whose keys and values lie in this cache, or in one of the same context and heads.

    n_rows: of one pass, more follow in further ones: MAX_ROWS or a prompt's whole chunk. turns: tables of rotary
    angles, None for layers without; workspace: of attention. n_used,
    n_predicted, n_neurons: see NeuronCounts; the former two are counted on the device.
    """

    def __init__(self, spec: ModelSpec, cache: GpuKvCache, n_rows: int = MAX_ROWS) -> None:
        self.n_rows = n_rows
        self.device = cache.pages.codes.device
        self.turns = _turns(spec, cache.max_tokens, self.device)
        self.workspace = attention_workspace(cache.pages, n_rows, spec.n_heads)
        self.buffers = _buffers(spec, self.device, n_rows)
        self.n_used, self.n_predicted = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        self.n_neurons = 0
        self._section_sums: Tensor | None = None

    def section_sums(self, width: int) -> Tensor:
        """fp32 (MAX_ROWS x width,) for what split FFNs of up to MAX_ROWS rows keep between their steps."""
        if self._section_sums is None:
            self._section_sums = torch.empty(MAX_ROWS * width, device=self.device)
        return self._section_sums

    def place(
        self,
        hidden: Tensor | None,
        slots: Sequence[int],
        positions: Sequence[int],
        may_skip: Sequence[bool] | None = None,
    ) -> None:
        """Copies the rows of a pass into the buffers. The host does not wait for a GPU to have them.

        may_skip: see Batch, where FFNs are neuron-major.
        """
        some = self.buffers.first(len(slots))
        if hidden is not None:
            some.x.copy_(hidden)
        pinned: dict[str, Any] = {"dtype": torch.int32, "pin_memory": self.device.type == "cuda"}
        numbers = torch.tensor([slots, positions, *([] if may_skip is None else [may_skip])], **pinned)
        some.slots.copy_(numbers[0], non_blocking=True)
        some.positions.copy_(numbers[1], non_blocking=True)
        if may_skip is not None:
            some.may_skip.copy_(numbers[2], non_blocking=True)


def _turns(spec: ModelSpec, n_positions: int, device: Any) -> dict[RopeSpec | None, Any]:
    return {None: None} | {
        rope: rope_table(rope.inverse_frequencies(n_positions), rope.scaling.magnitude, n_positions, device)
        for rope in spec.ropes
    }


def _buffers(spec: ModelSpec, device: Any, n_rows: int) -> SegmentBuffers:
    inner = spec.ffn_size * (2 if spec.gated and not spec.neuron_major else 1)
    widths = (spec.hidden_size, spec.hidden_size, spec.query_size + 2 * spec.kv_size, spec.query_size)
    floats = [torch.zeros(n_rows, width, device=device) for width in (*widths, inner, spec.ffn_size, spec.hidden_size)]
    integers = [torch.zeros(n_rows, dtype=torch.int32, device=device) for _ in range(3)]
    return SegmentBuffers(*floats, *integers)
