"""Drafts from a second, smaller model, which reads the same tokens as the model whose text it drafts.

The draft model has a KV cache of its own. It keeps every token that was right, so that a step after a verification
reads only the tokens that the verification added. Source: speculative decoding (arXiv 2211.17192); the drafts are
sampled with the noise of their verification instead of being accepted at random (derived).
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.decoding.requests import common_length
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.device import T
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, BESIDE_ROWS, Machine
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd, DraftNoise, drafted_of
from hetero_ee.runtime.executors.executor import BlockExecutor
from hetero_ee.runtime.work import BlockWorks
from hetero_ee.speculation.sources.source import ABSENT, Choose, Draft

NOT_FINITE = "the draft model computed logits that are not finite; decoding continues without its drafts there."


class DraftModelRunner:
    """Runs a draft model on the CPU or GPU of the machine that runs the target model.

    Args:
        executor: runs all of the draft model's blocks on that processor.
        machine: measures or emulates the time of the work.
        n_tokens: size of the target's vocabulary.
    """

    def __init__(
        self, executor: BlockExecutor, spec: ModelSpec, machine: Machine, n_tokens: int, *, on_gpu: bool
    ) -> None:
        blocks, self._n_tokens = decoder_blocks(spec), n_tokens
        self.spec, self.head_on_gpu, self.cache = spec, on_gpu, executor.cache
        self._executor, self._machine = executor, machine
        self._layers, self._head = [block for block in blocks if block.layer is not None], blocks[-1]
        self._works = BlockWorks(spec, blocks, BESIDE_KV_TYPE)

    def read(self, batch: Batch) -> Tensor:
        """Run tokens through embedding and layers. Return the last token's state (1, hidden) on the runner's device."""
        self.cache.admit(batch)
        executor, layers = self._executor, self._layers
        works = self._works.through(layers, batch)
        return self._run(works, lambda: self._marked(executor.forward(executor.embed(batch), batch, layers)[-1:]))

    def draft(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> list[Drafted]:
        """See Executor.draft."""
        works = self._works.head(self._head, end).draft(len(noise))
        rows = self._run(works, lambda: self._marked(self._executor.draft_rows(hidden, noise, end)))
        return drafted_of(self._machine.moved("drafts", rows, to_gpu=False)[0])

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        """Return the logits (m, target's vocabulary) on the CPU; ABSENT for tokens that the draft model lacks."""
        works = self._works.head(self._head, end).logits(len(hidden))
        logits = self._run(works, lambda: self._marked(self._executor.draft_logits(hidden, end)))
        logits = self._machine.moved("draft logits", logits, to_gpu=False)[0][:, : self._n_tokens]
        return torch.nn.functional.pad(logits, (0, self._n_tokens - logits.shape[1]), value=ABSENT)

    def _marked(self, x: Tensor) -> Tensor:
        """Return x as a tensor of the device that has computed it."""
        return self._machine.copier.to_gpu(x) if self.head_on_gpu else x

    @torch.inference_mode()
    def _run(self, works: Sequence[Work], compute: Callable[[], T]) -> T:
        return self._machine.device(on_gpu=self.head_on_gpu).run(works, compute)[0]


@dataclass(slots=True)
class _Sequence:
    """A sequence of the draft model's KV cache."""

    number: int
    token_ids: list[int] = field(default_factory=list)  # tokens that the cache holds


class DraftModelSource:
    """A DraftSource that computes drafts with a draft model.

    Args:
        runner: returns the current runner, or None if there is none. A new runner starts without sequences.
        warn: called once if logits are not finite.
    """

    name = "draft model"
    is_free = False

    def __init__(
        self, runner: Callable[[], DraftModelRunner | None], warn: Callable[[str], None], draft_s: float = 0.0
    ) -> None:
        self._runner_now, self._warn, self.draft_s = runner, warn, draft_s
        self._runner: DraftModelRunner | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._end, self._has_warned = DraftEnd(), False

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts. Yields nothing once the draft model's context is full."""
        history = list(token_ids)
        while True:
            runner = self._current()
            state = None if runner is None else self._state(runner, sequence, history)
            if state is None:
                return
            drafted = choose(state, self._end, history, runner)
            if drafted.token_id == NO_TOKEN or not math.isfinite(drafted.confidence):
                self._tell_not_finite()
                return
            yield Draft(*drafted)
            history.append(drafted.token_id)

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """See DraftSource.observe. Does nothing: `drafts` reads the tokens that the draft model lacks."""

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """See DraftSource.read_prompt. Reads the chunk at once if the tokens before it are known."""
        runner = self._current()
        if runner is None:
            return
        held = self._held(runner, sequence)
        if len(held.token_ids) >= first_position:
            self._state(runner, sequence, [*held.token_ids[:first_position], *token_ids])

    def truncate(self, sequence: int, length: int) -> None:
        runner = self._current()
        held = self._sequences.get(sequence)
        if runner is not None and held is not None:
            self._keep(runner, held, length)

    def close(self, sequence: int) -> None:
        runner, held = self._current(), self._sequences.pop(sequence, None)
        if runner is not None and held is not None:
            runner.cache.close(held.number)

    def _current(self) -> DraftModelRunner | None:
        """Return the current runner. If it is a new one, forget all sequences."""
        runner = self._runner_now()
        if runner is not self._runner:
            self._runner = runner
            self._sequences.clear()
        return runner

    def _held(self, runner: DraftModelRunner, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            self._sequences[sequence] = _Sequence(runner.cache.open_new())
        return self._sequences[sequence]

    def _state(self, runner: DraftModelRunner, sequence: int, token_ids: list[int]) -> Tensor | None:
        """Return the state (1, hidden) after the tokens, or None if the draft model can't read them.

        Reads the tokens after the common beginning with those in the cache, at least the last one.
        """
        if len(token_ids) > runner.cache.max_tokens:
            return None
        held = self._held(runner, sequence)
        is_longer = held.token_ids == token_ids[: len(held.token_ids)]  # the usual case, compared fast
        n_common = len(held.token_ids) if is_longer else common_length(held.token_ids, token_ids)
        self._keep(runner, held, min(n_common, len(token_ids) - 1))
        first = len(held.token_ids)
        if max(token_ids[first:]) >= runner.spec.vocab_size:
            return None
        state = None
        for start in range(first, len(token_ids), BESIDE_ROWS):
            piece = token_ids[start : start + BESIDE_ROWS]
            state = runner.read(Batch.of_sequence(held.number, start, piece))
            held.token_ids += piece
        return state

    def _keep(self, runner: DraftModelRunner, held: _Sequence, length: int) -> None:
        """Keep at most the first `length` tokens, also after a pass that was interrupted."""
        del held.token_ids[length:]
        if max(runner.cache.lengths(held.number), default=0) > len(held.token_ids):
            del held.token_ids[runner.cache.truncate(held.number, len(held.token_ids)) :]

    def _tell_not_finite(self) -> None:
        if not self._has_warned:
            self._warn(NOT_FINITE)
        self._has_warned = True
