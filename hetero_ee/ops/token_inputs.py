"""Look up what layers read of a pass's tokens in addition to hidden states, in the host's memory."""

from hetero_ee.kv.batch import Batch
from hetero_ee.layers.ops import Array, Ops
from hetero_ee.models.blocks import BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.device_weights import DeviceWeights


class TokenInputs:
    """Embeddings and rows of the layers' table, see Rows.inputs. A batch that passes several devices is looked up once.

    Args:
        ops: operations on the host.
        weights: the embedding and the table.
    """

    def __init__(self, spec: ModelSpec, ops: Ops, weights: DeviceWeights) -> None:
        self._spec, self._ops, self._weights = spec, ops, weights
        self._blocks = {block.kind: block for block in decoder_blocks(spec) if block.layer is None}
        self._last: tuple[Batch, tuple[Array, Array]] | None = None

    def __call__(self, batch: Batch) -> tuple[Array, Array]:
        """Return the embeddings (m, hidden) and the rows (m, width) of the batch's tokens."""
        if self._last is None or self._last[0] is not batch:
            table, weights = self._spec.layer_table, self._weights
            assert table is not None, "a layer reads tokens"
            embedded = self._spec.embedding.forward(self._ops, weights.of(self._blocks[BlockKind.EMBEDDING]), batch)
            rows = table.forward(self._ops, weights.of(self._blocks[BlockKind.TABLE]), batch)
            self._last = batch, (embedded, rows)
        return self._last[1]
