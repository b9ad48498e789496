"""What the tests of activation sparsity share: small random models laid out neuron by neuron, and text for them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hetero_ee.calibration.stages import Chunk
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks, first_matrix, least_activations, neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.curves import SHARES, Measurement, SparsityCurves
from hetero_ee.weights.model_weights import ModelWeights, as_stored, is_quantized
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.weight import DenseWeight
from tests.executor_support import Model
from tests.families import config_of

NEURONS = Quantization(matrices="rtn", neuron_major=True)
WHOLE_NEURONS = replace(NEURONS, first_in_rows=True)


def sparse_model(family: str, seed: int = 0) -> tuple[ModelSpec, ModelWeights]:
    """fp32, with neurons of unequal weight and layers of unequal size."""
    spec = replace(read_spec(config_of(family, num_hidden_layers=4)), neuron_major=True)
    random = torch.Generator().manual_seed(seed)
    weights = ModelWeights({}, {})
    for tensor in all_tensors(decoder_blocks(spec)):
        drawn = torch.randn(tensor.shape, generator=random)
        if not is_quantized(tensor.role):
            weights.vectors[tensor.name] = 0.1 * drawn + (0.0 if tensor.name.endswith("bias") else 1.0)
            continue
        if tensor.name.endswith("ffn.down"):
            drawn *= torch.randn(len(drawn), 1, generator=random).exp() * 0.1 * (1 + int(tensor.name.split(".")[1]))
        weights.matrices[tensor.name] = DenseWeight(drawn / tensor.shape[1] ** 0.5)
    return spec, weights


def stored_by_neurons(folder: Path, quantization: Quantization = NEURONS) -> Model:
    """The checkpoint in `folder` as a store in it, int4 and neuron-major."""
    spec = read_spec(folder)
    store = folder / ("whole" if quantization.first_in_rows else "store")
    weights = open_store(convert(folder, spec, store, quantization), spec)
    return as_stored(spec, weights), weights


def with_predictor(model: Model, bias: float = 0.0, rank: int = 32) -> Model:
    """A predictor whose scores are the gate's as far as this rank has them, plus the bias."""
    spec, weights = model
    spec = replace(spec, predictor_rank=rank)
    matrices, vectors = {}, {}
    for block in neuron_blocks(spec):
        gate = weights.matrices[block.tensors[first_matrix(spec)].name].dequantize()
        left, sizes, right = torch.linalg.svd(gate, full_matrices=False)
        low, high = sizes[:rank, None] ** 0.5 * right[:rank], left[:, :rank] * sizes[:rank] ** 0.5
        matrices[block.tensors["predictor_in"].name] = quantize(low.contiguous(), "rtn")
        matrices[block.tensors["predictor_out"].name] = quantize(high.contiguous(), "rtn")
        vectors[block.tensors["predictor_out_bias"].name] = torch.full((spec.ffn_size,), bias)
    return spec, replace(weights, matrices=weights.matrices | matrices, vectors=weights.vectors | vectors)


def with_least(model: Model, share: float) -> Model:
    """Activations below about this share's quantile don't count; nothing is left out at 0."""
    spec, weights = model
    if not share:
        return model
    blocks = neuron_blocks(spec)
    least = {least_activations(block): torch.full((spec.ffn_size,), 0.3 * share) for block in blocks}
    return spec, replace(weights, vectors=weights.vectors | least)


def random_chunks(spec: ModelSpec, n_chunks: int = 16, n_tokens: int = 40, seed: int = 0) -> list[Chunk]:
    random = np.random.default_rng(seed)
    return [tuple(map(int, random.integers(3, spec.vocab_size, n_tokens))) for _ in range(n_chunks)]


def some_curves(n_layers: int, seed: int = 0) -> SparsityCurves:
    """Rising thresholds and errors, and two measurements."""
    random = np.random.default_rng(seed)
    rising = [np.cumsum(random.random((n_layers, len(SHARES))), axis=1).astype(np.float32) for _ in range(2)]
    measured = Measurement(0.25, 0.26, 0.001), Measurement(0.5, 0.49, 0.02)
    return SparsityCurves(rising[0], rising[1], measured)
