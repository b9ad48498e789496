"""An executor that continues with a smaller plan if GPU memory runs out, and without a GPU if it is lost."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING

from torch import Tensor

from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.devices.traffic import Traffic
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.executors.executor import Executor, Observe
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.replans import Growth
from hetero_ee_kernels.pages import PAGE_TOKENS
from hetero_ee_profiles.units import GIB

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

SMALLER = 0.85  # of the bytes that did not fit, for the next plan
N_SMALLER = 3  # smaller plans tried at opening, each loaded, before the GPU is given up
TAKEN_BYTES = 2**29  # of VRAM: more than this process needs besides tensors (kernels, graphs, libraries)
Warn = Callable[[str], None]
Replan = Callable[[int, int], Plan]


class ReplanningExecutor(Executor):
    """Runs a plan, and replaces it by a smaller one if GPU memory runs out, or by one without a GPU if it is lost.

    After a step failed for lack of VRAM, the tokens of all open sequences are read again and the step is repeated once.
    That changes no result, since bits do not depend on batches. Errors for lack of RAM are passed on, as are errors of
    a prompt's observer, which runs within the prompt's step.

    Args:
        replan: makes a plan for a VRAM budget in bytes (0 for no GPU) and a context length; None passes errors on.
        open_plan: opens a plan, or raises DeviceMemoryError.
        warn: called with a sentence about each change of plan.
        reachable_bytes: returns the VRAM that this process has or could get; None if other programs can't take any.
        growth: enlarges a context length that the user did not choose.
    """

    def __init__(
        self,
        plan: Plan,
        replan: Replan | None,
        open_plan: Callable[[Plan], PlannedExecutor],
        warn: Warn,
        reachable_bytes: Callable[[], int] | None = None,
        growth: Growth | None = None,
    ) -> None:
        self._replan, self._open, self._warn, self.growth = replan, open_plan, warn, growth
        self._reachable_bytes = reachable_bytes
        self._token_ids: dict[int, list[int]] = {}  # by sequence: ids of the tokens in the cache's slots, or more
        self._trees: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}  # by sequence and slot: position and path
        self._emptied: set[int] = set()  # open sequences whose tokens were lost
        self._is_telling = False  # an observer, inside a step
        inner, problem = self._opened(plan)
        self._use(inner)
        if problem:
            self._tell_of(problem)
        self._reachable_at_first = reachable_bytes() if reachable_bytes is not None else 0
        self.spec, self.weights, self.blocks = inner.spec, inner.weights, decoder_blocks(inner.spec)

    @property
    def plan(self) -> Plan:
        return self.inner.plan

    @property
    def neurons(self) -> NeuronCounts:
        return self.inner.neurons

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    @property
    def pool(self) -> "ThreadPool | None":
        return self.inner.pool

    def close(self) -> None:
        self.inner.close()

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """Run the batch as in Executor.run. Raises: DeviceLostError: if earlier tokens of a sequence were lost."""
        self._refuse_lost(batch)
        if layers and not layers.start:
            self.make_room({sequence: position + 1 for _, sequence, position in batch.entries()})
            self._remember(batch)
        found = self._step(lambda inner, x: inner.run(batch, x, layers), hidden)
        self.captured = self.inner.captured
        return found

    def capture(self, layers: Sequence[int]) -> None:
        """Capture states as in Executor.capture, under this plan and later ones."""
        super().capture(layers)
        self.inner.capture(layers)

    def on_cpu(self, hidden: Tensor) -> Tensor:
        return self._step(lambda inner, x: inner.on_cpu(x), hidden)

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        """Run a prompt as in Executor.prompt. If it is repeated, chunks that are already cached are skipped."""
        rest, taken = iter(chunks), list[Batch]()
        first = next(rest)
        self._refuse_lost(first)
        coming = self._taken(chain([first], rest), taken)

        def prompt(inner: PlannedExecutor) -> Tensor:
            self._look_at_memory()
            batches: Iterable[Batch] = coming
            if taken:
                sequence, start = taken[0].sequences[0], taken[0].positions[0]
                list(coming)  # remembers the other chunks' tokens
                batches = _missing(inner, sequence, start, self._token_ids[sequence])
            return inner.prompt(batches, None if observe is None else partial(self._tell_observer, observe))

        return self._step(prompt)

    def _tell_observer(self, observe: Observe, batch: Batch, normed: Tensor, *captured: Tensor) -> None:
        self._is_telling = True
        try:
            observe(batch, normed, *captured)
        finally:
            self._is_telling = False

    def grow(self, n_tokens: int) -> int:
        """Replace the plan by one for a longer context, and read the tokens of open sequences again.

        If memory runs out, the former plan is restored.
        """
        former = self.plan
        larger = None if self.growth is None else self.growth.larger(former, n_tokens)
        if larger is not None and self.growth is not None:
            lengths = self._lengths()
            try:
                self._change(larger, lengths, former)
                self.growth.tell(former, self.plan)
            except DeviceMemoryError:
                self.growth.refused_tokens = n_tokens
                self._change(former, lengths, former)
        return self.cache.max_tokens

    def make_room(self, ends: Mapping[int, int]) -> None:
        """Enlarge the context if all sequences together will need more pages than the GPU has."""
        if self.growth is None or not _uses_gpu(self.plan):
            return
        after = {sequence: self.cache.length_at(sequence, 0) for sequence in self.cache.sequences}
        after |= {sequence: max(end, after.get(sequence, 0)) for sequence, end in ends.items()}
        n_pages = sum(-(-end // PAGE_TOKENS) for end in after.values())
        if n_pages > -(-self.cache.max_tokens // PAGE_TOKENS):
            self.grow(min(self.most_tokens, n_pages * PAGE_TOKENS))

    def remember(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Store the token ids of a restored sequence, to prefill them again if the plan changes. See Executor."""
        self._token_ids[sequence] = list(token_ids)
        self._emptied.discard(sequence)

    def _taken(self, chunks: Iterable[Batch], taken: list[Batch]) -> Iterator[Batch]:
        """Yield `chunks` and append each to the list `taken`, so that they can be run again."""
        for batch in chunks:
            self._remember(batch)
            taken.append(batch)
            yield batch

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._step(lambda inner, x: inner.final_norm(x), hidden)

    def lm_head(self, normed: Tensor) -> Tensor:
        return self._step(lambda inner, x: inner.lm_head(x), normed)

    @property
    def head_on_gpu(self) -> bool:
        return self.inner.head_on_gpu

    def draft_rows(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> Tensor:
        return self._step(lambda inner, x: inner.draft_rows(x, noise, end), hidden)

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        return self._step(lambda inner, x: inner.draft_logits(x, end), hidden)

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        return self._step(lambda inner, x: inner.partial_logits(x, token_ids, end), hidden)

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self._step(lambda inner, x: inner.to_logits(x), hidden)

    def _step(self, action: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Return action(executor, *tensors). If GPU memory runs out, use a smaller plan and run the action again.

        Args:
            tensors: hidden states that this executor computed, under this plan or an earlier one.
        """
        before = self._lengths() if self.cache.is_bounded else {}
        try:
            return action(self.inner, *self._within_reach(tensors))
        except DeviceMemoryError as error:
            if self._replan is None or self._is_telling or not _other_plan_helps(self.plan, error):
                raise
            problem = str(error)
        except DeviceLostError as error:
            if self._replan is None or self._is_telling:
                raise
            self._emptied |= set(self.cache.sequences)
            alone = self._replan(0, self.plan.context_tokens)
            self._change(alone, {sequence: [] for sequence in self.cache.sequences})
            raise DeviceLostError(
                f"{error} What was being generated is lost; from now on this runs on the CPU alone."
            ) from error
        # Not in the handler: the error's frames hold what the step had on the GPU.
        smaller = self._replan(_fewer_bytes(self.plan), self.plan.context_tokens)
        self._change(smaller, self._lengths(before))
        self._tell_of(problem)
        return action(self.inner, *self._within_reach(tensors))

    def _lengths(self, least: Mapping[int, list[int]] | None = None) -> dict[int, list[int]]:
        """Return each open sequence's number of cached tokens, layer by layer, or its number in `least` if larger.

        A pass of recurrent layers that fails may have rolled back more tokens than its own.
        """
        now = {sequence: self.cache.lengths(sequence) for sequence in self.cache.sequences}
        return {sequence: [*map(max, each, (least or {}).get(sequence, each))] for sequence, each in now.items()}

    def _remember(self, batch: Batch) -> None:
        """Store the ids of tokens that the first layer's cache does not have yet, to read them again if necessary."""
        for row, sequence, slot in batch.entries():
            if sequence in self.cache.sequences and slot >= self.cache.length_at(sequence, 0):
                self._token_ids.setdefault(sequence, [])[slot:] = [batch.token_ids[row]]
                if batch.paths:
                    self._trees.setdefault(sequence, {})[slot] = batch.positions[row], batch.paths[row]
                else:
                    self._trees.pop(sequence, None)

    def keep_path(self, sequence: int, first: int, slots: Sequence[int]) -> None:
        """See Executor."""
        token_ids, tree = self._token_ids.get(sequence, []), self._trees.pop(sequence, {})
        token_ids[first:] = [token_ids[slot] for slot in slots if slot < len(token_ids)]
        new = {slot: at for at, slot in enumerate(slots, first)}
        kept = {
            at: (tree[slot][0], tuple(new[each] for each in tree[slot][1])) for slot, at in new.items() if slot in tree
        }
        if any(at != position for at, (position, _) in kept.items()):  # several paths are left
            self._trees[sequence] = kept
        super().keep_path(sequence, first, slots)

    def _refuse_lost(self, batch: Batch) -> None:
        """Raise DeviceLostError if the batch continues a sequence whose cached tokens were lost with a device."""
        for _, sequence, position in batch.entries():
            if sequence in self._emptied and sequence in self.cache.sequences and position:
                raise DeviceLostError(
                    f"the first {position} tokens of this text were lost with the GPU; begin it again."
                )
            self._emptied.discard(sequence)

    def _within_reach(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors, moved to the CPU if the current plan does not use the GPU."""
        if _uses_gpu(self.plan):
            return list(tensors)
        return [None if x is None else x.cpu() for x in tensors]

    def _use(self, inner: PlannedExecutor, sequences: Iterable[int] = ()) -> None:
        """Switch to the executor `inner`, and open these sequences, still empty, in its cache."""
        self.inner, self.cache = inner, inner.cache
        self.inner.capture(self.capturing)
        self.prompt_chunk_tokens, self.overlap = inner.prompt_chunk_tokens, inner.overlap
        for sequence in sequences:
            self.cache.open(sequence)

    def _change(self, plan: Plan, lengths: dict[int, list[int]], otherwise: Plan | None = None) -> None:
        """Replace the executor by one for `plan`, and read the open sequences again.

        Args:
            lengths: for each sequence, the tokens that each layer's cache must hold. After an error it holds none.
            otherwise: the plan to open if `plan` can't be opened; None for one without the GPU.
        """
        snapshots = self.inner.cache.snapshots
        marks = {sequence: snapshots.lengths(sequence) for sequence in lengths}
        incomplete = {sequence for sequence, counts in lengths.items() if any(counts)}
        self._emptied |= incomplete
        self.inner.close()
        try:
            inner, _ = self._opened(plan)
        except BaseException:
            inner = self._open(otherwise or self._without_gpu(plan))  # it answers, whatever became of this text
            self._use(inner, lengths)
            raise
        self._use(inner, lengths)
        try:
            for sequence, counts in lengths.items():
                self._read_again(sequence, counts, marks[sequence])
        except BaseException:
            for sequence in lengths:
                self.cache.cut(sequence, 0)
            raise
        self._emptied -= incomplete

    def _read_again(self, sequence: int, lengths: list[int], marks: Sequence[int]) -> None:
        """Run a sequence's tokens again until each layer's cache holds the number given in `lengths`.

        Deeper layers never hold more. Tokens that pass the same number of layers run together, in chunks, after which
        state is kept where `marks` says so.
        """
        depths = [sum(position < length for length in lengths) for position in range(max(lengths, default=0))]
        for n_layers, group in groupby(range(len(depths)), key=depths.__getitem__):
            positions = list(group)
            first, stop = positions[0], positions[-1] + 1
            while first < stop:
                end = min(first + self.prompt_chunk_tokens, *(mark for mark in (*marks, stop) if mark > first))
                batch = Batch.of_sequence(sequence, first, self._token_ids[sequence][first:end])
                if tree := self._trees.get(sequence):
                    places = [tree.get(slot, (slot, ())) for slot in range(first, end)]
                    batch = replace(batch, positions=tuple(at for at, _ in places), paths=tuple(p for _, p in places))
                self.inner.run(batch, None, range(n_layers))
                if end in marks:
                    self.cache.mark(sequence)
                first = end

    def _without_gpu(self, plan: Plan) -> Plan:
        return plan if self._replan is None or not _uses_gpu(plan) else self._replan(0, plan.context_tokens)

    def _opened(self, plan: Plan) -> tuple[PlannedExecutor, str]:
        """Open the plan. If memory runs out, try smaller plans and finally one without the GPU.

        Returns:
            The executor, and the message of the first error; empty if there was none.
        """
        problem, n_left = "", N_SMALLER
        while True:
            try:
                return self._open(plan), problem
            except DeviceMemoryError as error:
                if self._replan is None or not _other_plan_helps(plan, error):
                    raise
                problem = problem or str(error)
            n_bytes, n_left = _fewer_bytes(plan) if n_left else 0, n_left - 1
            plan = self._replan(n_bytes, plan.context_tokens)  # not in the handler, see above

    def _tell_of(self, problem: str) -> None:
        """Warn the user of a problem and of the plan that is used instead."""
        budget = f"Planned again within {self.plan.vram_budget_bytes / GIB:.2f} GiB of VRAM; continuing."
        self._warn(f"{problem} {budget if _uses_gpu(self.plan) else 'Continuing without the GPU.'}")

    def _look_at_memory(self) -> None:
        """Warn once if another program has taken VRAM since the model was opened."""
        if self._reachable_bytes is None or not _uses_gpu(self.plan):
            return
        reachable = self._reachable_bytes()
        taken = self._reachable_at_first - reachable
        if taken >= TAKEN_BYTES:
            self._reachable_bytes = None
            self._warn(
                f"Another program has taken {taken / GIB:.1f} GiB of VRAM since this model was opened, and "
                f"{reachable / GIB:.1f} GiB are left to it; where it gets slow, close that program or lower "
                "the VRAM budget."
            )


def _uses_gpu(plan: Plan) -> bool:
    return plan.n_bytes(GPU) > 0


def _other_plan_helps(plan: Plan, error: DeviceMemoryError) -> bool:
    return error.device == GPU and _uses_gpu(plan)


def _fewer_bytes(plan: Plan) -> int:
    """Return a smaller VRAM budget than the plan has and uses."""
    return int(SMALLER * min(plan.vram_budget_bytes, plan.n_bytes(GPU)))


def _missing(executor: PlannedExecutor, sequence: int, first: int, token_ids: list[int]) -> list[Batch]:
    """Return the chunks of a sequence that are not in the executor's cache; the last chunk if all are.

    Args:
        first: position of the prompt's first token that was not cached before. Earlier tokens are read again only if
            the cache has lost them.
        token_ids: all tokens up to the prompt's end.
    """
    n_tokens, end = executor.prompt_chunk_tokens, len(token_ids)
    start = executor.cache.length(sequence)
    if start >= end:
        start = executor.cache.truncate(sequence, max(first, end - n_tokens))
    return [Batch.of_sequence(sequence, at, token_ids[at : at + n_tokens]) for at in range(start, end, n_tokens)]
