"""Executor protocols: they run a model's blocks, from tokens to logits.

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
    """Callback that receives a batch, its final normed states (m, hidden) and captured states, on their devices."""

    def __call__(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None: ...


PROMPT_CHUNK_TOKENS = 256  # bounds the memory of a long prompt's pass; Ctrl-C is answered between chunks


class HeadExecutor(Protocol):
    """The part of an executor that computes the end of a model: final norm and LM head."""

    cache: KvCache

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to states (m, hidden) after the last layer or an exit layer."""
        ...

    def lm_head(self, normed: Tensor) -> Tensor:
        """Multiply by the LM head: (m, hidden) -> logits (m, vocab)."""
        ...

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and LM head: (m, hidden) -> logits (m, vocab)."""
        return self.lm_head(self.final_norm(hidden))

    def draft_rows(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> Tensor:
        """Draft after states (m, hidden). Return int32 (m, 2) for drafted_of(), which an Executor moves to the CPU."""
        ...

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        """Return the logits that drafts are chosen from: (m, hidden) -> (m, n), n tokens in the vocabulary of `end`."""
        ...

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        """Return draft_logits of k tokens chosen for each row: (m, hidden), ids (m, k) -> (m, k).

        `end` must not have a vocabulary of its own.
        """
        ...

    def close(self) -> None: ...


class Executor(HeadExecutor, Protocol):
    """Runs a whole model. Sequences must be opened in `cache` before their first tokens."""

    spec: ModelSpec
    weights: ModelWeights
    blocks: list[Block]  # all of the model's
    prompt_chunk_tokens: int = PROMPT_CHUNK_TOKENS  # tokens of a prompt that are best run at a time
    progress: Progress | None = None  # callers that split a prompt into chunks report their progress to it
    overlap: Overlap | None = None  # work that runs on its own while the host computes
    growth: Growth | None = None  # of a context whose length was not requested
    capturing: tuple[int, ...] = ()  # see capture
    captured: tuple[Tensor, ...] = ()  # states before the capturing layers that the last run passed

    def capture(self, layers: Sequence[int]) -> None:
        """Make later passes keep the hidden states (m, hidden) before each of these ascending layers in `captured`.

        The states stay on the device that computed them. Raises: ValueError: if the model lacks a layer.
        """
        self.capturing = captured_layers(layers, self.spec.n_layers)

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """Run the batch through these layers and return the hidden states (m, hidden) after them.

        The batch's positions are added to the KV cache of these layers only.

        Args:
            hidden: states (m, hidden) before the layers; None to begin with the embedding.

        Raises:
            ValueError: if a token does not follow the last one in the cache. Nothing is computed then.
        """
        ...

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        """Run the chunks of a prompt in order and return the logits (vocab,) of its last token."""
        ...

    def on_cpu(self, hidden: Tensor) -> Tensor:
        """Wait for hidden states and return them in the CPU's memory, valid until the second later call."""
        ...

    @property
    def head_on_gpu(self) -> bool:
        """Whether the head is on a GPU, so that draft() needs fewer transfers than logits would."""
        return False

    def draft(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> list[Drafted]:
        """Draft one token from each of the hidden states (m, hidden).

        The device that holds the lm_head samples the tokens and computes their confidences.
        """
        return drafted_of(self.draft_rows(hidden, noise, end))

    @property
    def most_tokens(self) -> int:
        """Longest context length that grow() may reach."""
        return max(self.cache.max_tokens, 0 if self.growth is None else self.growth.most_tokens)

    @property
    def traffic(self) -> Traffic | None:
        """Bytes moved so far; None if they are not counted, as on the CPU without traces."""
        return None

    @property
    def neurons(self) -> NeuronCounts:
        """Numbers of neurons that sparse FFNs have used so far."""
        return NeuronCounts()

    @property
    def pool(self) -> "ThreadPool | None":
        """Thread pool of the CPU kernels, free for others while the executor is idle; None if it has none."""
        return None

    def grow(self, n_tokens: int) -> int:
        """Enlarge the context to n_tokens if allowed and possible, and return its length."""
        return self.cache.max_tokens

    def make_room(self, ends: Mapping[int, int]) -> None:
        """Prepare memory for a prompt. `ends` gives the tokens that each sequence will then have."""
        return

    def remember(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Register the tokens of a sequence whose keys and values the caller will write to the cache.

        Args:
            token_ids: all tokens of the sequence.
        """
        return

    def keep_path(self, sequence: int, first: int, slots: Sequence[int]) -> None:
        """Keep only this path of a draft tree, see KvCache.keep_path."""
        self.cache.keep_path(sequence, first, slots)

    def hidden(self, batch: Batch) -> Tensor:
        """Run the batch through embedding and layers. Return the states (m, hidden) after the last layer."""
        return self.run(batch, None, range(self.spec.n_layers))

    def logits(self, batch: Batch, wanted: Sequence[int]) -> Tensor:
        """Run the batch through every block. Return fp32 logits (len(wanted), vocab) of the rows `wanted`."""
        return self.to_logits(self.hidden(batch)[list(wanted)])


class SplitFfn(Protocol):
    """One device's part of a sparse FFN whose neurons are split between two devices.

    The device with the first neurons runs everything but `rest`. x is the FFN's input (m, hidden); with a predictor,
    its scores of the other neurons follow: (m, hidden + others).
    """

    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute x from the hidden states (m, hidden) before the FFN."""
        ...

    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        """Compute the sums of the first neurons for end(), without results of the other device."""
        ...

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the sum (m, hidden) of the other neurons, on the device that has them."""
        ...

    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        """Add both devices' sums and return the hidden states (m, hidden) after the FFN."""
        ...


class BlockExecutor(HeadExecutor, Protocol):
    """Computes blocks of a model on one device. `cache` has the layers whose state is on that device."""

    @property
    def neurons(self) -> NeuronCounts:
        """Numbers of neurons that this device has used in sparse FFNs so far."""
        ...

    def embed(self, batch: Batch) -> Tensor:
        """Return the states (m, hidden) before the first layer. Raises: ValueError: if an id has no embedding."""
        ...

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by the matrix called `name` and add its bias: x (m, K) -> (m, N)."""
        ...

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Apply RMSNorm with the weights called `name`: (m, K) -> (m, K)."""
        ...

    def mix(self, x: Tensor, batch: Batch, block: Block) -> Tensor:
        """Run a block's mixer on its normed input x (m, K); return (m, hidden) before post-norm and residual scale.

        The batch must have been admitted to the cache.
        """
        ...

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """Run states (m, hidden) through consecutive blocks. The batch must have been admitted to the cache."""
        ...

    def forward_with(self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights) -> Tensor:
        """Run one block with `weights`, which replace the executor's own weights of the same names."""
        ...

    def split(self, block: Block, n_first: int) -> SplitFfn:
        """Return this device's part of a sparse FFN with n_first neurons on the GPU, for up to 16 tokens."""
        ...

    def attend_uploaded(
        self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights, owner: "HostExecutor"
    ) -> Tensor:
        """Run one attention block with `weights`. Its keys and values come from the cache of the CPU's executor."""
        ...


class HostExecutor(Executor, BlockExecutor):
    """Base of executors that run a whole model, or some of its blocks, in the CPU's memory.

    Args:
        cache: a KV cache, of some layers only if another executor runs the rest; None makes one for all layers.
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
        """Raise the cache's maximum length as in Executor.grow. Its memory is allocated only as it is used."""
        if self.plan is not None and self.growth is not None:
            former, larger = self.plan, self.growth.larger(self.plan, n_tokens)
            if larger is not None:
                self.plan, self.cache.max_tokens = larger, larger.context_tokens
                self.growth.tell(former, larger)
        return self.cache.max_tokens

    def close(self) -> None:
        """Do nothing: this base class starts no threads."""
