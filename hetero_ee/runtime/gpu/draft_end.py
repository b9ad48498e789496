"""From hidden states to drafts on a GPU: final norm, exit map, head, and the choice with its confidence.

One sequence of launches for every m rows, for a CUDA graph to replay; only ids and confidences leave the GPU.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero_ee.layers.ops import LOGITS
from hetero_ee.ops.arena import MAX_ROWS
from hetero_ee.ops.gpu import GpuMatrix, GpuOps
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise, noise_words
from hetero_ee.runtime.gpu.segment import Recorder, Replays, entered
from hetero_ee.weights.weight import Weight


class GpuDraftEnd:
    """final_norm: of states on the GPU, into new ones; head: the model's, None where the end has rows of its own;
    finished: makes logits of a head's product, in place.

    Matrices must be in tiles. recorder: None runs every launch by itself.
    """

    def __init__(
        self,
        end: DraftEnd,
        final_norm: Callable[[Tensor], Tensor],
        head: GpuMatrix | None,
        finished: Callable[[Tensor], Tensor],
        hidden_size: int,
        ops: GpuOps,
        recorder: Recorder | None,
    ) -> None:
        self._ops, self._device = ops, ops.device
        device = ops.device
        self._finished = finished
        self._final_norm = None if end.is_normed else final_norm
        self._map: list[GpuMatrix] = []
        if end.state_map is not None:
            self._map = [self._linear(each) for each in (end.state_map.down, end.state_map.up) if each is not None]
            self._map_bias = end.state_map.bias.to(device)
        self._ids = None
        if end.vocabulary is not None:
            head, self._ids = self._linear(end.vocabulary.rows), end.vocabulary.token_ids.int().to(device)
        assert head is not None, "an end without rows of its own takes the model's head"
        self._head = head
        self._network = None if end.judge is None else tuple(part.to(device) for part in end.judge.network)
        self._x = torch.zeros(MAX_ROWS, hidden_size, device=device)
        self._noise = torch.zeros(noise_words([]).shape[1] * MAX_ROWS, dtype=torch.int32, device=device)
        self._out = torch.zeros(MAX_ROWS, 2, dtype=torch.int32, device=device)
        self._replays = Replays(recorder)

    @torch.inference_mode()
    def run(self, hidden: Tensor, noise: Sequence[DraftNoise]) -> Tensor:
        """States (m, hidden) -> int32 (m, 2) on the GPU, for drafted_of. The host does not wait."""
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
        """What drafts are chosen from: (m, hidden) -> (m, n) on the GPU."""
        with entered(self._device):
            some = [self._logits(each.contiguous()) for each in torch.split(hidden.to(self._device), MAX_ROWS)]
        return some[0] if len(some) == 1 else torch.cat(some)

    @torch.inference_mode()
    def partial_logits(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The same of chosen tokens alone, each row its own: (m, hidden), (m, k) -> (m, k) on the GPU."""
        ids = token_ids.to(self._device).contiguous()
        with entered(self._device):
            x = self._mapped(hidden.to(self._device).contiguous())
            return self._finished(self._ops.sliced_head(x, self._head, ids))

    def _compute(self, m: int) -> None:
        """Launches alone: they depend on m and nothing else."""
        logits = self._logits(self._x[:m])
        self._ops.kernels.draft(logits, self._words(m), self._network, self._ids, self._out[:m])

    def _logits(self, x: Tensor) -> Tensor:
        return self._finished(self._ops.linear(self._mapped(x), self._head, LOGITS))

    def _mapped(self, x: Tensor) -> Tensor:
        """What the head multiplies."""
        if self._final_norm is not None:
            x = self._final_norm(x)
        if self._map:
            inner = x
            for linear in self._map:
                inner = self._ops.linear(inner, linear, LOGITS)
            self._ops.add(inner, x)
            self._ops.add(inner, self._map_bias)
            x = inner
        return x

    def _words(self, m: int) -> Tensor:
        """The noise of m rows, in one piece."""
        return self._noise[: m * len(self._noise) // MAX_ROWS].view(m, -1)

    def _linear(self, weight: Weight) -> GpuMatrix:
        return self._ops.matrix("a matrix for drafts", weight, None)
