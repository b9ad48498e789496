"""An executor that goes on when its GPU runs out of memory, by a plan that takes less, and survives losing it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.reference import Executor, Observe

SMALLER = 0.85  # of the bytes that were too much: what is left for the plan made instead
N_SMALLER = 3  # such plans are tried at opening, each of them loaded, before the GPU is done without
TAKEN_BYTES = 2**29  # of VRAM: what this process takes besides tensors (kernels, graphs, libraries) stays below it
PIECE_TOKENS = 256  # whose keys and values are fetched at a time, as there may be little memory left to gather them in
GIB = 2**30
Warn = Callable[[str], None]


class ReplanningExecutor(Executor):
    """replan: a plan within so many bytes of GPU memory, 0 for none; None: errors are passed on. open_plan: makes it
    ready; where memory can't be had, a smaller one is opened. warn: is told in a sentence what was done.
    reachable_bytes: GPU memory that other programs leave to this one, in use or not; None where there are no others.

    A step that failed for want of the GPU's memory is repeated once; the CPU's own is not the GPU's to make up for.
    """

    def __init__(
        self,
        plan: Plan,
        replan: Callable[[int], Plan] | None,
        open_plan: Callable[[Plan], PlannedExecutor],
        warn: Warn,
        reachable_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._replan, self._open, self._warn = replan, open_plan, warn
        self._reachable_bytes = reachable_bytes
        self._emptied: set[int] = set()  # open sequences whose tokens were lost with a device
        self._inner, problem = self._opened(plan)
        if problem:
            self._tell_of(problem)
        self._reachable_at_first = reachable_bytes() if reachable_bytes is not None else 0
        self.spec, self.weights = self._inner.spec, self._inner.weights
        self.blocks = decoder_blocks(self.spec)

    @property
    def plan(self) -> Plan:
        """The one that is being run."""
        return self._inner.plan

    @property
    def inner(self) -> PlannedExecutor:
        """What runs it."""
        return self._inner

    @property
    def cache(self) -> Any:  # type: ignore[override]
        """Of the present plan: another one after a step was repeated."""
        return self._inner.cache

    @property
    def prompt_chunk_tokens(self) -> int:  # type: ignore[override]
        """See Executor."""
        return self._inner.prompt_chunk_tokens

    @property
    def overlap(self) -> Overlap | None:  # type: ignore[override]
        """See Executor: the present plan's."""
        return self._inner.overlap

    def close(self) -> None:
        self._inner.close()

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """See Executor.run. Raises DeviceLostError for a sequence whose tokens were lost."""
        self._refuse_lost(batch)
        return self._step(lambda inner, x: inner.run(batch, x, layers), hidden)

    def on_cpu(self, hidden: Tensor) -> Tensor:
        """See Executor.on_cpu."""
        return self._step(lambda inner, x: inner.on_cpu(x), hidden)

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        """See Executor.prompt. Chunks that the cache holds already are not computed again."""
        every = list(chunks)
        self._refuse_lost(every[0])

        def prompt(inner: PlannedExecutor) -> Tensor:
            self._look_at_memory()
            return inner.prompt(_missing(inner, every), observe)

        return self._step(prompt)

    def logits(self, batch: Batch, wanted: Sequence[int]) -> Tensor:
        """See Executor.logits."""
        hidden = self.hidden(batch)
        return self.head(hidden[list(wanted)])

    def embed(self, batch: Batch) -> Tensor:
        """See Executor.embed."""
        return self._step(lambda inner: inner.embed(batch))

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """See Executor.forward."""
        return self._step(lambda inner, x: inner.forward(x, batch, blocks), hidden)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See Executor.final_norm."""
        return self._step(lambda inner, x: inner.final_norm(x), hidden)

    def lm_head(self, normed: Tensor) -> Tensor:
        """See Executor.lm_head."""
        return self._step(lambda inner, x: inner.lm_head(x), normed)

    def lm_head_on_cpu(self, normed: Tensor) -> Tensor:
        """See Executor.lm_head_on_cpu."""
        return self._step(lambda inner, x: inner.lm_head_on_cpu(x), normed)

    def sliced(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """See Executor.sliced."""
        return self._step(lambda inner, x: inner.sliced(x, token_ids), normed)

    def head(self, hidden: Tensor) -> Tensor:
        """See Executor.head."""
        return self._step(lambda inner, x: inner.head(x), hidden)

    def _step(self, action: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """action(executor, *tensors). tensors: hidden states that came out of an executor, this one or one before."""
        try:
            return action(self._inner, *self._within_reach(tensors))
        except DeviceMemoryError as error:
            if self._replan is None or not _can_do_without(self._inner.plan, error):
                raise
            problem = str(error)
        except DeviceLostError as error:
            if self._replan is None:
                raise
            self._emptied |= set(self._inner.cache.sequences)
            self._change(self._replan(0), {sequence: [] for sequence in self._inner.cache.sequences})
            raise DeviceLostError(
                f"{error} What was being generated is lost; from now on this runs on the CPU alone."
            ) from error
        # Not in the handler: the error's frames hold what the step had on the GPU.
        self._change(self._replan(_fewer_bytes(self._inner.plan)), self._contents())
        self._tell_of(problem)
        return action(self._inner, *self._within_reach(tensors))

    def _refuse_lost(self, batch: Batch) -> None:
        """Rows of sequences that a lost device has emptied follow nothing, unless they begin again."""
        for _, sequence, position in batch.places():
            if sequence in self._emptied and sequence in self._inner.cache.sequences and position:
                raise DeviceLostError(
                    f"the first {position} tokens of this text were lost with the GPU; begin it again, on the CPU."
                )
            self._emptied.discard(sequence)

    def _within_reach(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The tensors, brought to the CPU where nothing runs on the GPU any more."""
        if _uses_gpu(self._inner.plan):
            return list(tensors)
        return [None if x is None else x.cpu() for x in tensors]

    def _contents(self) -> "_Contents":
        """Keys and values of all sequences. Raises DeviceMemoryError where there is not even room to fetch them."""
        inner = self._inner
        assert inner.machine.gpu is not None, "only a GPU has plans made again"
        found, _ = inner.machine.gpu.run([], lambda: _contents(inner.cache))
        return found

    def _change(self, plan: Plan, contents: "_Contents") -> None:
        """The plan's executor in place of the present one, with these keys and values."""
        self._inner.close()
        try:
            self._inner, _ = self._opened(plan)
        except BaseException:
            self._inner = self._open(self._without_gpu(plan))  # an engine that answers, whatever became of this text
            raise
        _restore(self._inner.cache, contents)

    def _without_gpu(self, plan: Plan) -> Plan:
        return self._replan(0) if self._replan is not None and _uses_gpu(plan) else plan

    def _opened(self, plan: Plan) -> tuple[PlannedExecutor, str]:
        """The plan ready to run, else one that takes less, at last one without the GPU; and what stood in the way."""
        problem, n_left = "", N_SMALLER
        while True:
            try:
                return self._open(plan), problem
            except DeviceMemoryError as error:
                if self._replan is None or not _can_do_without(plan, error):
                    raise
                problem = problem or str(error)
            plan = self._replan(_fewer_bytes(plan) if n_left else 0)  # not in the handler, see above
            n_left -= 1

    def _tell_of(self, problem: str) -> None:
        """What went wrong, and how it goes on."""
        plan = self._inner.plan
        budget = f"Planned again within {plan.vram_budget_bytes / GIB:.2f} GiB of VRAM, and going on."
        self._warn(f"{problem} {budget if _uses_gpu(plan) else 'Going on without the GPU.'}")

    def _look_at_memory(self) -> None:
        """Tells, once, of another program that has taken VRAM."""
        if self._reachable_bytes is None or not _uses_gpu(self._inner.plan):
            return
        reachable = self._reachable_bytes()
        taken = self._reachable_at_first - reachable
        if taken >= TAKEN_BYTES:
            self._reachable_bytes = None
            self._warn(
                f"Another program has taken {taken / GIB:.1f} GiB of VRAM since this model was opened, and "
                f"{reachable / GIB:.1f} GiB are left to it; where it gets slow, close that program or lower "
                "--vram-budget."
            )


# Of each sequence, for each layer in order: (keys, values), fp32 (n_kv_heads, n_tokens, head_dim).
_Contents = dict[int, list[tuple[Tensor, Tensor]]]


def _contents(cache: Any) -> _Contents:
    return {
        sequence: [_layer_contents(cache, layer, sequence) for layer in cache.held_layers]
        for sequence in cache.sequences
    }


def _layer_contents(cache: Any, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
    n_tokens = cache.length_at(sequence, layer)
    firsts = range(0, max(n_tokens, 1), PIECE_TOKENS)
    pieces = [cache.read(layer, sequence, first, min(first + PIECE_TOKENS, n_tokens)) for first in firsts]
    keys, values = (torch.cat([part.cpu() for part in parts], 1) for parts in zip(*pieces, strict=True))
    return keys, values


def _restore(cache: Any, contents: _Contents) -> None:
    """Opens the sequences and fills them; one without layers stays empty."""
    for sequence, layers in contents.items():
        cache.open(sequence)
        for layer, (keys, values) in enumerate(layers):
            n_tokens = keys.shape[1]
            if n_tokens:
                cache.admit(Batch.of_sequence(sequence, 0, [0] * n_tokens), range(layer, layer + 1))
            for first in range(0, n_tokens, PIECE_TOKENS):
                piece = slice(first, min(first + PIECE_TOKENS, n_tokens))
                batch = Batch.of_sequence(sequence, first, [0] * (piece.stop - first))
                cache.write(layer, batch, keys[:, piece].transpose(0, 1), values[:, piece].transpose(0, 1))


def _uses_gpu(plan: Plan) -> bool:
    return plan.n_bytes(GPU) > 0


def _can_do_without(plan: Plan, error: DeviceMemoryError) -> bool:
    """Whether another plan would help."""
    return error.device == GPU and _uses_gpu(plan)


def _fewer_bytes(plan: Plan) -> int:
    """Of VRAM, for a plan in the place of this one, which may not use all that it may."""
    return int(SMALLER * min(plan.vram_budget_bytes, plan.n_bytes(GPU)))


def _missing(executor: PlannedExecutor, chunks: Sequence[Batch]) -> list[Batch]:
    """What its cache lacks of a sequence's rows, in chunks of its own size; where it has all, the last ones again."""
    rows, n_tokens = Batch.joined(list(chunks)), executor.prompt_chunk_tokens
    sequence, first, end = rows.sequences[0], rows.positions[0], rows.positions[-1] + 1
    start = max(first, executor.cache.length(sequence))
    if start >= end:
        start = max(first, end - n_tokens)
        executor.cache.cut(sequence, start)
    token_ids = list(rows.token_ids)
    return [
        Batch.of_sequence(sequence, at, token_ids[at - first : min(at + n_tokens, end) - first])
        for at in range(start, end, n_tokens)
    ]
