"""The executor walks the decoder's blocks: rows in, logits out. Pre-norm, residual around each block."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hetero_ee.config import Progress
from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.kv.cache import KvCache
from hetero_ee.runtime.torch_ops import TorchOps
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import Weight

Observe = Callable[[Batch, Tensor], None]  # is told rows and their final normed states (m, hidden)
PROMPT_CHUNK_TOKENS = 256  # bounds the memory of a long prompt's pass; Ctrl-C is answered between chunks


class Executor:
    """Runs one model in plain torch. `cache` holds the sequences; open them there before their first rows.

    cache: of some layers alone where others compute the rest, of all where None. prompt_chunk_tokens: rows of a prompt
    that are best run at a time. progress: told how far a prompt of several chunks is, by those who cut it up. overlap:
    what runs by itself while the host computes; None where nothing does.
    """

    prompt_chunk_tokens = PROMPT_CHUNK_TOKENS
    progress: Progress | None = None
    overlap: Overlap | None = None

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        max_tokens: int,
        ops: TorchOps | None = None,
        *,
        cache: KvCache | None = None,
    ) -> None:
        self.spec = spec
        self.blocks = decoder_blocks(spec)
        self.cache = cache or KvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, max_tokens)
        self.weights, self._ops = weights, ops or TorchOps()

    def close(self) -> None:
        """Ends what the executor keeps running: here nothing."""

    @torch.inference_mode()
    def logits(self, batch: Batch, wanted: Sequence[int]) -> Tensor:
        """Runs the rows through every block; fp32 logits (len(wanted), vocab) of the wanted row indices."""
        hidden = self.hidden(batch)
        return self.head(hidden[list(wanted)])

    def hidden(self, batch: Batch) -> Tensor:
        """Runs the rows through embedding and layers, which fills their KV cache: (m, hidden) after the last layer."""
        return self.run(batch, None, range(self.spec.n_layers))

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        """Runs the chunks of a prompt in order: logits (vocab,) of the last one's last row."""
        hidden = None
        for batch in chunks:
            hidden = self.hidden(batch)
            if observe is not None:
                observe(batch, self.final_norm(hidden))
        assert hidden is not None, "a prompt has a token"
        return self.head(hidden[-1:])[0]

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """The rows through these layers: hidden states (m, hidden) before them -> after them.

        hidden: None begins with the embedding. Admits the rows to the cache of these layers alone; raises ValueError,
        and computes nothing, unless each follows the last token there.
        """
        if layers:
            self.cache.admit(batch, layers)
        start = self.embed(batch) if hidden is None else hidden
        return self.forward(start, batch, self.blocks[1 + 2 * layers.start : 1 + 2 * layers.stop]) if layers else start

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Tensor:
        """(m, hidden) before the first layer."""
        return self._embed(self.blocks[0], batch)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """The same through attentions and FFNs that follow each other; rows are admitted already."""
        for block in blocks:
            if block.kind is BlockKind.ATTENTION:
                hidden = hidden + self._attend(block, hidden, batch)
            else:
                hidden = hidden + self._feed_forward(block, hidden)
        return hidden

    def forward_with(self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights) -> Tensor:
        """`walk` through one block with these weights in place of the executor's own of the same names."""
        own = self.weights
        self.weights = ModelWeights(own.matrices | weights.matrices, own.vectors | weights.vectors)
        try:
            return self.forward(hidden, batch, [block])
        finally:
            self.weights = own

    def attend_uploaded(
        self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights, owner: "Executor"
    ) -> Tensor:
        """The same through an attention whose keys and values are in the cache of another executor."""
        return owner.forward_with(hidden, batch, block, weights)  # memory of one machine: whoever computes

    def on_cpu(self, hidden: Tensor) -> Tensor:
        """Hidden states in the CPU's memory, waited for: what is run after this no longer stands in their way.

        Valid until the second call after.
        """
        return hidden

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the head multiplies: (m, hidden) after the last layer, or where a row exits, -> (m, hidden)."""
        block = self.blocks[-2]
        return self._norm(block, hidden) if block.kind is BlockKind.FINAL_NORM else hidden

    @torch.inference_mode()
    def lm_head(self, normed: Tensor) -> Tensor:
        """The head's product: (m, hidden) -> logits (m, vocab)."""
        return self._ops.linear(normed, self._matrix(self.blocks[-1], "tokens"))

    def lm_head_on_cpu(self, normed: Tensor) -> Tensor:
        """The same by the CPU, wherever the head lies, for what is there anyway."""
        return self.lm_head(normed)

    @torch.inference_mode()
    def sliced(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """Logits of chosen tokens alone, each row its own: (m, hidden), (m, k) -> (m, k)."""
        return self.lm_head(normed).gather(1, token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and head: (m, hidden) -> logits (m, vocab)."""
        return self.lm_head(self.final_norm(hidden))

    def _embed(self, block: Block, batch: Batch) -> Tensor:
        hidden = self._ops.embed(self._matrix(block, "tokens"), batch.token_ids)
        positions = self._vector(block, "positions")
        if positions is None:
            return hidden
        offset = self.spec.learned_position_offset or 0
        return hidden + positions[torch.tensor(batch.positions) + offset]

    def _attend(self, block: Block, hidden: Tensor, batch: Batch) -> Tensor:
        spec, ops, layer = self.spec, self._ops, block.layer
        assert layer is not None
        qkv = ops.linear(self._norm(block, hidden), self._matrix(block, "qkv"), self._vector(block, "qkv_bias"))
        queries, keys, values = (
            part.reshape(len(batch), -1, spec.head_dim)
            for part in torch.split(qkv, [spec.query_size, spec.kv_size, spec.kv_size], -1)
        )
        if spec.qk_norm:
            queries = ops.norm(queries, "rms", self._vector(block, "query_norm"), None, spec.norm_eps)
            keys = ops.norm(keys, "rms", self._vector(block, "key_norm"), None, spec.norm_eps)
        if spec.rope:
            queries, keys = (ops.rope(part, batch.positions, spec.rope) for part in (queries, keys))
        self.cache.write(layer, batch, keys, values)
        attended = ops.attention(queries, self.cache, layer, batch, spec.sliding_windows[layer])
        return ops.linear(attended.flatten(1), self._matrix(block, "output"), self._vector(block, "output_bias"))

    def _feed_forward(self, block: Block, hidden: Tensor) -> Tensor:
        first = "gate_up" if self.spec.gated else "up"
        normed = self._norm(block, hidden)
        inner = self._ops.linear(normed, self._matrix(block, first), self._vector(block, f"{first}_bias"))
        active = self._ops.activate(inner, self.spec)
        return self._ops.linear(active, self._matrix(block, "down"), self._vector(block, "down_bias"))

    def _norm(self, block: Block, x: Tensor) -> Tensor:
        spec = self.spec
        return self._ops.norm(
            x, spec.norm, self._vector(block, "norm"), self._vector(block, "norm_bias"), spec.norm_eps
        )

    def _matrix(self, block: Block, short: str) -> Weight:
        return self.weights.matrices[block.tensors[short].name]

    def _vector(self, block: Block, short: str) -> Tensor | None:
        tensor = block.tensors.get(short)
        return None if tensor is None else self.weights.vectors[tensor.name]
