"""Opens a draft model on the machine that runs the target model, and says what drafting with it costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.head_cost import HeadCost
from hetero_ee.costs.work import Work
from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import RUN_OPTIONS
from hetero_ee.planning.statistics import DraftRates, PromptReading
from hetero_ee.planning.times.memory import DRAFT_MODEL, WorkingSizes, rounded
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, BESIDE_ROWS, Machine
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.work import BlockWorks
from hetero_ee.speculation.sources.beside import BesideOpener, Running
from hetero_ee.speculation.sources.draft_head_costs import TYPICAL_CONTEXT_TOKENS, prompt_pieces, works_s
from hetero_ee.speculation.sources.draft_head_opening import head_on_cpu
from hetero_ee.speculation.sources.draft_model import DraftModelRunner
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.hardware import HardwareProfile

FIRST_COMPARED, MOST_MORE = 5, 128  # first compared token, and most tokens that one vocabulary may have more: llama.cpp


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A model that drafts for another one."""

    name: str
    spec: ModelSpec
    weights: ModelWeights
    tokenizer: Tokenizer

    def check_vocabulary(self, target: Tokenizer, n_tokens: int) -> None:
        """Check that both models mean the same by a token, by the rules of llama.cpp's draft models.

        Args:
            target: the tokenizer of the model whose text is drafted, and the size of its vocabulary.

        Raises: UsageError: if a token after the first five differs, or the sizes differ by more than 128.
        """
        n_mine = self.spec.vocab_size
        if abs(n_mine - n_tokens) > MOST_MORE:
            raise UsageError(OPTION, f" {self.name} has {n_mine} tokens and the model {n_tokens}; {OTHER}")
        pairs = zip(self.tokenizer.pieces(), target.pieces(), range(min(n_mine, n_tokens)), strict=False)
        for mine, other, token_id in islice(pairs, FIRST_COMPARED, None):
            if mine != other:
                raise UsageError(OPTION, f" {self.name} calls token {token_id} {mine!r}, the model {other!r}; {OTHER}")

    def rates(self, profile: HardwareProfile, threads: int, acceptance: tuple[float, ...]) -> DraftRates:
        """Return the planner's rates for the draft model on the CPU, and on the GPU if there is one."""
        by_gpu = None if profile.gpu is None else self._rates(profile, threads, acceptance, on_gpu=True)
        return self._rates(profile, threads, acceptance, on_gpu=False, by_gpu=by_gpu)

    def _rates(
        self,
        profile: HardwareProfile,
        threads: int,
        acceptance: tuple[float, ...],
        *,
        on_gpu: bool,
        by_gpu: DraftRates | None = None,
    ) -> DraftRates:
        seconds = _Seconds(self.spec, profile, threads, on_gpu)
        reading = PromptReading(cache(seconds.reading_s), on_gpu)
        memory_bytes = cache(partial(self.memory_bytes, on_gpu=on_gpu))
        name = f"the draft model {self.name}"
        return DraftRates(
            name, acceptance, seconds.draft_s, reading, memory_bytes, by_gpu=by_gpu, memory_term=DRAFT_MODEL
        )

    def memory_bytes(self, context_tokens: int, n_sequences: int = 1, *, on_gpu: bool) -> int:
        """Return the bytes of weights, keys and values and, on a GPU, the layers' buffers."""
        blocks = _gpu_blocks(self.spec) if on_gpu else decoder_blocks(self.spec)
        costs = [BlockCost.of(self.spec, block, BESIDE_KV_TYPE) for block in blocks]
        parts = [n for cost in costs for n in (cost.weight_bytes, cost.state_bytes(context_tokens, n_sequences))]
        if not on_gpu:
            return sum(parts)
        room = WorkingSizes.of(self.spec).gpu_terms(context_tokens, BESIDE_ROWS)
        return sum(map(rounded, parts)) + sum(term.n_bytes for term in room)


def _gpu_blocks(spec: ModelSpec) -> list[Block]:
    """Return the blocks that a GPU holds: all but the table of per-layer embeddings, which is read on the host."""
    return [block for block in decoder_blocks(spec) if block.kind is not BlockKind.TABLE]


OPTION, OTHER = RUN_OPTIONS["draft_model"], "name a smaller model of the same family."


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds of a draft model's passes on one device of a profile."""

    spec: ModelSpec
    profile: HardwareProfile
    threads: int
    on_gpu: bool

    @property
    def draft_s(self) -> float:
        """Seconds of one draft: all layers, the head, and the transfer of a GPU's choice."""
        blocks = decoder_blocks(self.spec)
        head = HeadCost(BlockCost.of(self.spec, blocks[-1]))
        link = self.profile.link if self.on_gpu else None
        layers_s = self._pass_s(Batch.of_sequence(0, TYPICAL_CONTEXT_TOKENS, [0]))
        return (
            layers_s
            + self._works_s(head.draft(1) if self.on_gpu else head.logits(1))
            + (0.0 if link is None else link.transfer.value)
        )

    def reading_s(self, m: int, context_tokens: int) -> float:
        """Return the seconds to read m tokens, the last of a prompt of context_tokens."""
        return sum(map(self._pass_s, prompt_pieces(m, context_tokens)))

    def _pass_s(self, batch: Batch) -> float:
        layers = [block for block in decoder_blocks(self.spec) if block.layer is not None]
        return self._works_s(BlockWorks(self.spec, layers, BESIDE_KV_TYPE).through(layers, batch))

    def _works_s(self, works: Sequence[Work]) -> float:
        return works_s(works, self.spec, self.profile, self.threads, on_gpu=self.on_gpu)


class DraftModelOpener(BesideOpener[DraftModelRunner]):
    """Opens a draft model. See BesideOpener for `target`, `running` and `warn`."""

    def __init__(
        self, model: DraftModel, target: Executor, running: Running | None, warn: Callable[[str], None]
    ) -> None:
        super().__init__(target, running, warn, "draft model")
        self._model = model

    def _opened(self, machine: Machine, *, on_gpu: bool) -> DraftModelRunner:
        spec, weights, target = self._model.spec, self._model.weights, self._target
        max_tokens = min(target.cache.max_tokens if on_gpu else target.most_tokens, spec.max_context_tokens)
        n_tokens = target.spec.vocab_size
        if not on_gpu or machine.open_beside is None:
            on_cpu = head_on_cpu(spec, weights, max_tokens, target.pool)
            return DraftModelRunner(on_cpu, spec, machine, n_tokens, on_gpu=on_gpu)
        executor = machine.open_beside(spec, weights, _gpu_blocks(spec), max_tokens)
        machine.opened_beside.append(executor)
        return DraftModelRunner(executor, spec, machine, n_tokens, on_gpu=True)
