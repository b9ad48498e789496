"""A predictor of active neurons: for each FFN two int4 matrices of low rank, in tiles, and a bias."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import TileWeight

MAX_PREDICTED_KL_NATS = 0.001  # about a thousandth of the perplexity, PowerInfer's bound (arXiv 2312.12456)
MARGINS = tuple(step / 4 for step in range(33))  # logits


@dataclass(frozen=True, slots=True, eq=False)
class LayerPredictor:
    """Logits that neurons are active: outer (inner x) + bias; (rank, hidden), (ffn, rank), fp32 (ffn,)."""

    inner: TileWeight
    outer: TileWeight
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PredictorMeasurement:
    """Measurement of one margin on held-out text. A neuron is computed if its logit is above -margin."""

    margin: float
    recall: float  # of active neurons, those that were computed
    predicted_share: float  # of all neurons, those that were computed
    active_share: float  # of all neurons, those that are not 0
    kl_nats: float  # mean KL divergence of the next-token distribution, from all neurons to the predicted ones

    def __post_init__(self) -> None:
        shares = self.recall, self.predicted_share, self.active_share
        is_possible = all(0 <= share <= 1 for share in shares) and 0 <= self.kl_nats < math.inf
        if self.margin not in MARGINS or not is_possible:
            raise ValueError(f"it measures {shares} and {self.kl_nats} nats at {self.margin}")


@dataclass(frozen=True, slots=True, eq=False)
class NeuronPredictor:
    """Predictors of all layers, in order, and their measurements."""

    layers: tuple[LayerPredictor, ...]
    measured: tuple[PredictorMeasurement, ...]

    @property
    def rank(self) -> int:
        return self.layers[0].inner.shape[0]

    def chosen(self, max_kl_nats: float = MAX_PREDICTED_KL_NATS) -> PredictorMeasurement:
        """Return the measurement of the least margin within the bound. Raises: UsageError: if none is."""
        within = [each for each in self.measured if each.kl_nats <= max_kl_nats]
        if not within:
            least = min((each.kl_nats for each in self.measured), default=math.inf)
            raise UsageError(
                f"this model's active neurons can't be predicted within {max_kl_nats} nats of KL divergence, "
                f"{least:.2g} at best; calibrate on more text, or use --sparsity exact."
            )
        return min(within, key=lambda each: each.margin)

    def expected(self, spec: ModelSpec, measured: PredictorMeasurement) -> ModelSpec:
        """Return the model with this predictor, and the shares of neurons for planning."""
        active = measured.active_share
        return replace(
            spec,
            neuron_major=True,
            first_in_rows=True,
            predictor_rank=self.rank,
            predicted_share=measured.predicted_share,
            active_shares=(measured.recall * active, active),
        )

    def merged(self, spec: ModelSpec, weights: ModelWeights, margin: float) -> ModelWeights:
        """Return the weights with the predictor's. spec: from `expected`."""
        matrices, vectors = dict(weights.matrices), dict(weights.vectors)
        for block, layer in zip(neuron_blocks(spec), self.layers, strict=True):
            matrices[block.tensors["predictor_in"].name] = layer.inner
            matrices[block.tensors["predictor_out"].name] = layer.outer
            vectors[block.tensors["predictor_out_bias"].name] = layer.bias + margin
        return replace(weights, matrices=matrices, vectors=vectors)


def least_within(
    measure: Callable[[float], PredictorMeasurement], max_kl_nats: float = MAX_PREDICTED_KL_NATS
) -> list[PredictorMeasurement]:
    """Find the least of MARGINS within the bound by bisection, and return all measurements."""
    found, low, high = [], -1, len(MARGINS)
    while high - low > 1:
        middle = (low + high) // 2
        found.append(measure(MARGINS[middle]))
        low, high = (low, middle) if found[-1].kl_nats <= max_kl_nats else (middle, high)
    return found
