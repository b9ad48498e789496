"""Drafts on a GPU from hidden states: final norm, exit map, head, and the chosen token with its confidence.

The launches for each number of rows are replayed by a CUDA graph. Only ids and confidences leave the GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.ops.arena import MAX_ROWS
from hetero_ee.ops.gpu import GpuOps
from hetero_ee.runtime.draft_logits import DraftLogits
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise, noise_words
from hetero_ee.runtime.gpu.segment import Recorder, Replays, entered


class GpuDraftEnd:
    """A DraftEnd on a GPU. Without a recorder, kernels are launched one by one instead of by CUDA graphs."""

    def __init__(
        self, end: DraftEnd, logits: DraftLogits, hidden_size: int, ops: GpuOps, recorder: Recorder | None
    ) -> None:
        self._ops, self._device, self._end = ops, ops.device, logits
        device = ops.device
        self._ids = None if end.vocabulary is None else end.vocabulary.token_ids.int().to(device)
        self._network = None if end.judge is None else tuple(part.to(device) for part in end.judge.network)
        self._x = torch.zeros(MAX_ROWS, hidden_size, device=device)
        self._noise = torch.zeros(noise_words([]).shape[1] * MAX_ROWS, dtype=torch.int32, device=device)
        self._out = torch.zeros(MAX_ROWS, 2, dtype=torch.int32, device=device)
        self._replays = Replays(recorder)

    @torch.inference_mode()
    def run(self, hidden: Tensor, noise: Sequence[DraftNoise]) -> Tensor:
        """Draft after states (m, hidden). Return int32 (m, 2) for drafted_of(), on the GPU and without waiting."""
        words = noise_words(noise)
        if self._device.type == "cuda":
            words = words.pin_memory()
        found = torch.empty(len(noise), 2, dtype=torch.int32, device=self._device)
        with entered(self._device):
            for first in range(0, len(noise), MAX_ROWS):
                some = slice(first, min(first + MAX_ROWS, len(noise)))
                m = some.stop - first
                self._x[:m].copy_(hidden[some])
                self._words(m).copy_(words[some], non_blocking=True)
                self._replays.run(m, self._compute)
                found[some] = self._out[:m]
        return found

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that drafts are chosen from: (m, hidden) -> (m, n) on the GPU."""
        with entered(self._device):
            some = [
                self._end.all(self._ops, each.contiguous()) for each in torch.split(hidden.to(self._device), MAX_ROWS)
            ]
        return some[0] if len(some) == 1 else torch.cat(some)

    @torch.inference_mode()
    def partial_logits(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logits of k tokens chosen for each row: (m, hidden), ids (m, k) -> (m, k) on the GPU."""
        ids = token_ids.to(self._device).contiguous()
        with entered(self._device):
            x = hidden.to(self._device, copy=True, memory_format=torch.contiguous_format)
            found: Tensor = self._end.some(self._ops, x, ids)
        return found

    def _compute(self, m: int) -> None:
        """Launch the kernels for m rows. Launches depend only on m, so that a CUDA graph can replay them."""
        logits = self._end.all(self._ops, self._x[:m])
        self._ops.kernels.draft(logits, self._words(m), self._network, self._ids, self._out[:m])

    def _words(self, m: int) -> Tensor:
        """Return the contiguous part of the noise buffer for m rows."""
        return self._noise[: m * len(self._noise) // MAX_ROWS].view(m, -1)
