"""The Executor protocol: what runs a model's blocks, from tokens to logits.

A token's bits depend only on that token and its sequence, never on its batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from hetero_ee.config import Progress
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.captured import captured_layers, cut
from hetero_ee.runtime.choice import drafted
from hetero_ee.runtime.devices.traffic import Traffic
from hetero_ee.runtime.drafted import Drafted, DraftEnd, DraftNoise, drafted_of, drafted_rows
from hetero_ee.runtime.replans import Growth
from hetero_ee.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool


class Observe(Protocol):
    """Receive a batch, its final normed states (m, hidden) and the captured ones, where they were computed."""

    def __call__(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None: ...


PROMPT_CHUNK_TOKENS = 256  # bounds the memory of a long prompt's pass; Ctrl-C is answered between chunks


class HeadExecutor(Protocol):
    """The end of a model: final norm and LM head. What every executor has."""

    cache: KvCache

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the head's input from states (m, hidden) after the last layer, or where a token exits."""
        ...

    def lm_head(self, normed: Tensor) -> Tensor:
        """Multiply by the LM head: (m, hidden) -> logits (m, vocab)."""
        ...

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and LM head: (m, hidden) -> logits (m, vocab)."""
        return self.lm_head(self.final_norm(hidden))

    def draft_rows(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> Tensor:
        """Draft after states (m, hidden). Return int32 (m, 2) for drafted_of(); an Executor returns it on the CPU."""
        ...

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        """Return the logits that drafts are chosen from: (m, hidden) -> (m, vocab), or (m, rows of the end)."""
        ...

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        """Return draft_logits of chosen tokens, each row its own: (m, hidden), (m, k) -> (m, k).

        The end must not have rows of its own.
        """
        ...

    def close(self) -> None:
        """Stop the executor's threads and free its memory."""
        ...


class Executor(HeadExecutor, Protocol):
    """Runs a whole model. Open sequences in `cache` before their first tokens."""

    spec: ModelSpec
    weights: ModelWeights
    blocks: list[Block]  # all of the model's
    prompt_chunk_tokens: int = PROMPT_CHUNK_TOKENS  # tokens of a prompt that are best run at a time
    progress: Progress | None = None  # callers that split a prompt into chunks report their progress to it
    overlap: Overlap | None = None  # work that runs on its own while the host computes
    growth: Growth | None = None  # of a context whose length was not requested
    capturing: tuple[int, ...] = ()  # see capture
    captured: tuple[Tensor, ...] = ()  # by the last run, before those of these layers that it passed

    def capture(self, layers: Sequence[int]) -> None:
        """Make later passes keep the hidden states (m, hidden) before each of these layers, ascending, in `captured`.

        They stay on the device that computed them. Raises: ValueError: if the model lacks a layer.
        """
        self.capturing = captured_layers(layers, self.spec.n_layers)

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """Run the batch through these layers and return the hidden states (m, hidden) after them.

        Admits the batch to the KV cache of these layers only.

        Args:
            hidden: States (m, hidden) before the layers; None to begin with the embedding.

        Raises:
            ValueError: if a token does not follow the last one in the cache. Nothing is computed then.
        """
        ...

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        """Run the chunks of a prompt in order and return the logits (vocab,) of its last token."""
        ...

    def on_cpu(self, hidden: Tensor) -> Tensor:
        """Wait for hidden states and return them in the CPU's memory, valid until the second call after this."""
        ...

    @property
    def head_on_gpu(self) -> bool:
        """Whether the head is on a GPU, where draft() chooses and judges drafts with fewer transfers."""
        return False

    def draft(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> list[Drafted]:
        """Return a draft after each of the states (m, hidden), chosen and judged on the head's device."""
        return drafted_of(self.draft_rows(hidden, noise, end))

    @property
    def most_tokens(self) -> int:
        """The longest context that grow() may reach."""
        return max(self.cache.max_tokens, 0 if self.growth is None else self.growth.most_tokens)

    @property
    def traffic(self) -> Traffic | None:
        """Bytes moved so far; None if nothing counts them: on the CPU alone, without traces."""
        return None

    @property
    def neurons(self) -> NeuronCounts:
        """Neurons used so far. Those of dense FFNs are not counted."""
        return NeuronCounts()

    @property
    def pool(self) -> "ThreadPool | None":
        """The CPU kernels' threads, which others may use while the executor does not; None if it has none."""
        return None

    def grow(self, n_tokens: int) -> int:
        """Ask for a context of n_tokens. Returns its new length, less if it may not grow or does not fit."""
        return self.cache.max_tokens

    def make_room(self, ends: Mapping[int, int]) -> None:
        """Prepare memory for a prompt, after which these sequences hold this many tokens."""
        return

    def hidden(self, batch: Batch) -> Tensor:
        """Run the batch through embedding and layers. Return the states (m, hidden) after the last layer."""
        return self.run(batch, None, range(self.spec.n_layers))

    def logits(self, batch: Batch, wanted: Sequence[int]) -> Tensor:
        """Run the batch through every block. Return fp32 logits (len(wanted), vocab) of the wanted row indices."""
        return self.to_logits(self.hidden(batch)[list(wanted)])


class SplitFfn(Protocol):
    """One device's part of a sparse FFN that is split between two devices.

    The device with the first neurons runs everything but `rest`. x is the FFN's input (m, hidden), followed by a
    predictor's scores of the other neurons if there is one: (m, hidden + others).
    """

    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute x from the hidden states (m, hidden) before the FFN."""
        ...

    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        """Compute the first neurons' sums for end(). Nothing from the other device is needed."""
        ...

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the other neurons' sum (m, hidden), on the device that holds them."""
        ...

    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        """Combine both sums and return the hidden states (m, hidden) after the FFN."""
        ...


class BlockExecutor(HeadExecutor, Protocol):
    """Computes any blocks of a model on one device. `cache` holds the layers that are attended there."""

    @property
    def neurons(self) -> NeuronCounts:
        """Neurons used by the FFNs that it computed, see Executor.neurons."""
        ...

    def embed(self, batch: Batch) -> Tensor:
        """Return the states (m, hidden) before the first layer. Raises ValueError for ids outside the vocabulary."""
        ...

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return x W^T + bias by the matrix of that name: (m, K) -> (m, N)."""
        ...

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Return the RMSNorm by the vector of that name: (m, K) -> (m, K)."""
        ...

    def mix(self, x: Tensor, batch: Batch, block: Block) -> Tensor:
        """Return the mixer's output (m, hidden) for its normed input x (m, K), before any post-norm and residual scale.

        The batch is admitted already.
        """
        ...

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """Run states (m, hidden) through blocks that follow each other. The batch is admitted already."""
        ...

    def forward_with(self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights) -> Tensor:
        """Run one block with borrowed weights in place of the executor's own of the same names."""
        ...

    def split(self, block: Block, n_first: int) -> SplitFfn:
        """Return this device's part of an FFN whose other neurons are on another device. Up to 16 tokens."""
        ...

    def attend_uploaded(
        self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights, owner: "HostExecutor"
    ) -> Tensor:
        """Run forward_with through an attention whose keys and values are in the cache of the CPU's executor."""
        ...


class HostExecutor(Executor, BlockExecutor):
    """Base of executors that run a whole model, or some of its blocks, in the CPU's memory.

    cache: holds some layers, if other executors compute the rest. None makes one for all layers, in kv_type.
    """

    kv_type: ClassVar[str] = KV_TYPE
    plan: Plan | None = None  # the plan, if this executor runs all of it

    def __init__(self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, cache: KvCache | None = None) -> None:
        self.spec, self.weights, self.blocks = spec, weights, decoder_blocks(spec)
        self._neurons = NeuronCounts()
        self.cache = cache or host_cache(spec, max_tokens, self.kv_type)

    @property
    def neurons(self) -> NeuronCounts:
        return self._neurons

    def split(self, block: Block, n_first: int) -> SplitFfn:
        raise UsageError(f"{block.name} can't be split: its weights are not quantized; plan without hot neurons.")

    def draft_rows(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> Tensor:
        logits = self.draft_logits(hidden, end)
        token_ids = None if end.vocabulary is None else end.vocabulary.token_ids
        return drafted_rows([drafted(row, one, end.judge, token_ids) for row, one in zip(logits, noise, strict=True)])

    def attend_uploaded(
        self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights, owner: "HostExecutor"
    ) -> Tensor:
        return owner.forward_with(hidden, batch, block, weights)  # the memory is one machine's: the owner computes

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        if layers:
            self.cache.admit(batch, layers)
        x, captured = self.embed(batch) if hidden is None else hidden, []
        for part in cut(layers, self.capturing):
            if part.start in self.capturing:
                captured.append(x)
            blocks = [block for block in self.blocks if block.layer is not None and block.layer in part]
            x = self.forward(x, batch, blocks)
        self.captured = tuple(captured)
        return x

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        hidden = None
        for batch in chunks:
            hidden = self.hidden(batch)
            if observe is not None:
                observe(batch, self.final_norm(hidden), *self.captured)
        assert hidden is not None, "a prompt has a token"
        return self.to_logits(hidden[-1:])[0]

    def on_cpu(self, hidden: Tensor) -> Tensor:
        return hidden

    def grow(self, n_tokens: int) -> int:
        """See Executor.grow. The cache takes memory as it is used, so that it is only told of a higher end."""
        if self.plan is not None and self.growth is not None:
            former, larger = self.plan, self.growth.larger(self.plan, n_tokens)
            if larger is not None:
                self.plan, self.cache.max_tokens = larger, larger.context_tokens
                self.growth.tell(former, larger)
        return self.cache.max_tokens

    def close(self) -> None:
        """Do nothing: this base starts nothing that must be stopped."""
