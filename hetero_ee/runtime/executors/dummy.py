"""An executor that computes nothing, to emulate the timing of models without having their weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hetero_ee.costs.product import stored_layout
from hetero_ee.costs.work import units_of
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.layers.tensors import TensorSpec, is_in_rows
from hetero_ee.models.blocks import Block, all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import HostExecutor, SplitFfn
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.rows import RowWeight, row_sizes
from hetero_ee.weights.tiles import SCALES_A_TILE, TILE_BYTES, tile_grid
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

DUMMY = "dummy"  # what stands for the quantizer


class DummyExecutor(HostExecutor):
    """An executor that returns hidden states unchanged and logits of 0. Its cache only counts tokens."""

    def __init__(self, spec: ModelSpec, max_tokens: int, layers: tuple[int, ...] | None = None) -> None:
        n_layers = spec.n_layers if layers is None else len(layers)
        cache = CpuKvCache(n_layers, 0, 0, max_tokens, layers, kind=self.kv_type)
        super().__init__(spec, dummy_weights(spec), max_tokens, cache)

    def embed(self, batch: Batch) -> Tensor:
        return torch.zeros(len(batch), self.spec.hidden_size)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return torch.zeros(len(x), self.weights.matrices[name].shape[0])

    def normed(self, x: Tensor, name: str) -> Tensor:
        return x

    def mix(self, x: Tensor, batch: Batch, block: Block) -> Tensor:
        return torch.zeros(len(x), self.spec.hidden_size)

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        return hidden

    def split(self, block: Block, n_first: int) -> SplitFfn:
        units = units_of(block)
        assert units is not None, "has no units that two devices could share"
        n_sent = units.group(units.n_units - n_first).sent_values(is_predicted=self.spec.predictor_rank > 0)
        return _DummySplit(n_sent - self.spec.hidden_size)

    def forward_with(self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights) -> Tensor:
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def lm_head(self, normed: Tensor) -> Tensor:
        return torch.zeros(normed.shape[0], self.spec.vocab_size)

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        return (
            self.lm_head(hidden) if end.vocabulary is None else torch.zeros(len(hidden), end.vocabulary.rows.shape[0])
        )

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        return torch.zeros(token_ids.shape)


@dataclass(frozen=True, slots=True)
class _DummySplit(SplitFfn):
    """A split FFN that computes nothing. n_more values, scores or routes, go to the CPU with each token's state."""

    n_more: int

    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        return pad(hidden, (0, self.n_more))

    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        return x[:, : x.shape[1] - self.n_more]

    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        return hidden


def dummy_weights(spec: ModelSpec) -> ModelWeights:
    """Return weights in the model's shapes that occupy almost no memory, since each tensor repeats one value."""
    weights = ModelWeights({}, {}, DUMMY)
    for tensor in all_tensors(decoder_blocks(spec)):
        if is_quantized(tensor.role):
            made = _dummy_rows if is_in_rows(tensor.role) else _dummy_tiles
            weights.matrices[tensor.name] = made(tensor)
        else:
            weights.vectors[tensor.name] = torch.zeros(1).expand(tensor.n_elements).view(tensor.shape)
    return weights


def _dummy_rows(tensor: TensorSpec) -> RowWeight:
    n_rows, n_columns = tensor.shape
    codes_bytes, scales_bytes = row_sizes(1, n_columns)
    codes = torch.zeros(1, dtype=torch.uint8).expand(n_rows, codes_bytes)
    scales = torch.zeros(1, dtype=torch.float16).expand(n_rows, scales_bytes // 2)
    return RowWeight(codes, scales, 0, tuple(range(-8, 8)), n_columns)


def _dummy_tiles(tensor: TensorSpec) -> TileWeight:
    layout = stored_layout(tensor)
    n_rows, n_columns = tensor.shape
    grid = tile_grid(n_rows, n_columns)
    tiles = torch.zeros(1, dtype=torch.int8 if layout == "int8" else torch.uint8)
    return TileWeight(
        tiles=tiles.expand(*grid, TILE_BYTES[layout]),
        scales=torch.zeros(1, dtype=torch.float16).expand(*grid, SCALES_A_TILE[layout]),
        exponent=0,
        codebook=LINEAR_CODEBOOK if layout.startswith("int4") else None,
        n_rows=n_rows,
        n_columns=n_columns,
    )
