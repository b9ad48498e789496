"""Final norm, head and chosen logits on the GPU's kernels, where no layer is there: near plain torch, exact among
themselves."""

import pytest
import torch

from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.blocks import BlockKind, decoder_blocks
from hetero_ee.ops.gpu_operations import gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.gpu import GpuExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.model_weights import with_terms
from tests.executor_support import MAX_TOKENS, Model, model_of
from tests.gpu_support import DEVICE, assert_same_bits, random

INT8_ACTIVATIONS = 2e-3  # normalised squared error, as for a segment
N_ROWS = 3


@pytest.fixture(scope="module", params=["llama-gelu", "opt"])  # rows that are not aligned; LayerNorm
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, "int4", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("n_terms", "error"), [(2, 1e-9), (1, INT8_ACTIVATIONS)])
@pytest.mark.sample(1)
def test_the_head(model: Model, n_terms: int, error: float) -> None:
    spec, weights = model[0], with_terms(model[1], n_terms)
    blocks = [block for block in decoder_blocks(spec) if block.kind in (BlockKind.FINAL_NORM, BlockKind.HEAD)]
    cache = GpuKvCache((0, spec.n_kv_heads, spec.head_dim), MAX_TOKENS, torch.device(DEVICE), layers=(), kind="fp16")
    layers = GpuExecutor(spec, weights, blocks, cache, gpu_operations(Registry(), "cuda"), N_ROWS)
    reference, hidden = ReferenceExecutor(*model, MAX_TOKENS), random(0, N_ROWS, spec.hidden_size, scale=3.0)
    normed = layers.final_norm(hidden)
    torch.testing.assert_close(normed.cpu(), reference.final_norm(hidden.cpu()))
    logits = layers.lm_head(normed)
    expected = reference.lm_head(normed.cpu())
    assert (logits.cpu() - expected).square().sum() <= error * expected.square().sum()
    for row in range(N_ROWS):
        alone = layers.final_norm(hidden[row : row + 1])  # begins anywhere
        assert_same_bits(alone[0], normed[row])
        assert_same_bits(layers.lm_head(normed[row : row + 1])[0], logits[row])
    ids = torch.tensor([[5, spec.vocab_size - 1, 5, 0]]).expand(N_ROWS, 4)
    assert_same_bits(layers.partial_logits(hidden, ids, DraftEnd()), logits.gather(1, ids.to(DEVICE)))
