"""An executor that goes on when its GPU runs out of memory, by a plan that takes less, and survives losing it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.executor import Executor, Observe
from hetero_ee.runtime.planned_executor import PlannedExecutor
from hetero_ee.runtime.rows import Rows

SMALLER = 0.85  # of the budget that was too much: what is left for the plan made instead
Notice = Callable[[str], None]
T = TypeVar("T")


class ReplanningExecutor(Executor):
    """replan: a plan within so many bytes of GPU memory, 0 for none; open_plan: makes it ready.

    notice: is told in a sentence what was done. A step that failed for want of memory is repeated once.
    """

    def __init__(
        self,
        plan: Plan,
        replan: Callable[[int], Plan],
        open_plan: Callable[[Plan], PlannedExecutor],
        notice: Notice,
    ) -> None:
        self._replan, self._open, self._notice = replan, open_plan, notice
        self._inner = self._opened(plan)
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

    def close(self) -> None:
        self._inner.close()

    def run(self, rows: Rows, hidden: Tensor | None, layers: range) -> Tensor:
        """See Executor.run."""
        return self._step(lambda inner: inner.run(rows, hidden, layers))

    def prompt(self, chunks: Iterable[Rows], observe: Observe | None = None) -> Tensor:
        """See Executor.prompt. Chunks that the cache holds already are not computed again."""
        every = list(chunks)
        return self._step(lambda inner: inner.prompt(_missing(inner, every), observe))

    def logits(self, rows: Rows, wanted: Sequence[int]) -> Tensor:
        """See Executor.logits."""
        hidden = self.hidden(rows)
        return self.head(hidden[list(wanted)])

    def embed(self, rows: Rows) -> Tensor:
        """See Executor.embed."""
        return self._step(lambda inner: inner.embed(rows))

    def walk(self, hidden: Tensor, rows: Rows, blocks: Sequence[Block]) -> Tensor:
        """See Executor.walk."""
        return self._step(lambda inner: inner.walk(hidden, rows, blocks))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See Executor.final_norm."""
        return self._step(lambda inner: inner.final_norm(hidden))

    def project(self, normed: Tensor) -> Tensor:
        """See Executor.project."""
        return self._step(lambda inner: inner.project(normed))

    def sliced(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """See Executor.sliced."""
        return self._step(lambda inner: inner.sliced(normed, token_ids))

    def head(self, hidden: Tensor) -> Tensor:
        """See Executor.head."""
        return self._step(lambda inner: inner.head(hidden))

    def _step(self, action: Callable[[PlannedExecutor], T]) -> T:
        try:
            return action(self._inner)
        except DeviceMemoryError as error:
            if not _uses_gpu(self._inner.plan):
                raise
            budget = int(SMALLER * self._inner.plan.vram_budget_bytes)
            self._change(budget, _contents(self._inner.cache))
            self._notice(f"{error} Planned again within {budget / 2**30:.2f} GiB of VRAM, and going on.")
            return action(self._inner)
        except DeviceLostError as error:
            self._change(0, {sequence: [] for sequence in self._inner.cache.sequences})
            raise DeviceLostError(
                f"{error} What was being generated is lost; from now on this runs on the CPU alone."
            ) from error

    def _change(self, budget_bytes: int, contents: "_Contents") -> None:
        """Another plan's executor in place of the present one, with these keys and values."""
        plan = self._replan(budget_bytes)
        self._inner.close()
        self._inner = self._opened(plan)
        _restore(self._inner.cache, contents)

    def _opened(self, plan: Plan) -> PlannedExecutor:
        """The plan ready to run, or one without a GPU where its memory can't be had."""
        try:
            return self._open(plan)
        except DeviceMemoryError as error:
            if not _uses_gpu(plan):
                raise
            self._notice(f"{error} Going on without the GPU.")
            return self._open(self._replan(0))


# Of each sequence, for each layer in order: (keys, values), fp32 (n_kv_heads, n_tokens, head_dim).
_Contents = dict[int, list[tuple[Tensor, Tensor]]]


def _contents(cache: Any) -> _Contents:
    return {
        sequence: [
            tuple(part.clone() for part in cache.read(layer, sequence, 0, cache.length_at(sequence, layer)))
            for layer in cache.held_layers
        ]
        for sequence in cache.sequences
    }


def _restore(cache: Any, contents: _Contents) -> None:
    """Opens the sequences and fills them; one without layers stays empty."""
    for sequence, layers in contents.items():
        cache.open(sequence)
        for layer, (keys, values) in enumerate(layers):
            n_tokens = keys.shape[1]
            if n_tokens:
                rows = Rows.of_sequence(sequence, 0, [0] * n_tokens)
                cache.admit(rows, range(layer, layer + 1))
                cache.write(layer, rows, keys.transpose(0, 1), values.transpose(0, 1))


def _uses_gpu(plan: Plan) -> bool:
    return plan.n_bytes("gpu") > 0


def _missing(executor: PlannedExecutor, chunks: Sequence[Rows]) -> list[Rows]:
    """The chunks of one sequence that its cache lacks; where it has all, the last one again, for its result."""
    left = [rows for rows in chunks if rows.positions[-1] >= executor.cache.length(rows.sequences[0])]
    if not left:
        last = chunks[-1]
        executor.cache.cut(last.sequences[0], last.positions[0])
        left = [last]
    return left
