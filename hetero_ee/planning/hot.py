"""Hot neurons: the first, often active ones of a sparse FFN on the GPU, the others on the CPU, both computing at once.

A placement "hot-N" says of how many of the FFN's sections, which the kernels add up from the last to the first, so that
the sum has the same bits however it is divided (cpu_ops' sparse_ffn.py). Prompts have the whole FFN visit the GPU.

Source: PowerInfer (arXiv 2312.12456), with sections in place of single neurons.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero_ee.planning.parts import ALL_NEURONS, NeuronRows, NeuronShares, Product
from hetero_ee.weights.sections import MAX_SECTIONS, section_neurons
from hetero_ee_profiles.hardware import interpolated

LEVELS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 26)  # sections that the planner tries: more change little, and take longer
SPLITS = tuple(f"hot-{n}" for n in range(1, MAX_SECTIONS))


@dataclass(frozen=True, slots=True)
class Half:
    """What one device multiplies with, and which shares of its own neurons a token needs."""

    products: tuple[Product, ...]
    neurons: NeuronRows
    shares: NeuronShares

    @property
    def n_bytes(self) -> int:
        """Of its matrices."""
        return sum(product.n_bytes for product in self.products) + self.neurons.n_bytes

    @property
    def token_bytes(self) -> int:
        """What one token reads of them."""
        return sum(product.n_bytes for product in self.products) + self.neurons.read_bytes(self.shares, 1)


def hot_sections(placement: str) -> int:
    """Sections on the GPU; 0 for an FFN that is not split."""
    return SPLITS.index(placement) + 1 if placement in SPLITS else 0


def hot_neurons(n_neurons: int, placement: str) -> int:
    """Of so many neurons those on the GPU."""
    return hot_sections(placement) * section_neurons(n_neurons)


def splits(n_neurons: int, *, every: bool = False) -> list[str]:
    """Placements of the planner's levels, or all, that leave either device some of the neurons."""
    found = SPLITS if every else [SPLITS[n - 1] for n in LEVELS]
    return [placement for placement in found if hot_neurons(n_neurons, placement) < n_neurons]


def hot_activations(curve: Sequence[float], share: float) -> float:
    """Of the neurons that a text's token needs, how many are among this share of all. curve: see ModelSpec."""
    points = enumerate((0.0, *(curve or (1.0,))))
    return interpolated([(i / max(1, len(curve)), found) for i, found in points], share)


def halves(
    products: Iterable[Product],
    neurons: NeuronRows,
    placement: str,
    shares: NeuronShares = ALL_NEURONS,
    curve: Sequence[float] = (),
) -> tuple[tuple[Product, ...], Half, Half]:
    """Of a sparse FFN the products that are the GPU's whole, its part of the others, and the CPU's.

    shares: of all neurons; curve: see ModelSpec.hot_curve.
    """
    products, size = tuple(products), neurons.n_neurons
    by_neuron = [each for each in products if (each.n_rows, each.n_columns) == (size, neurons.n_columns)]
    n_hot = hot_neurons(size, placement)
    taken = hot_activations(curve, n_hot / size)

    def half(n: int, activations: float) -> Half:
        own = NeuronShares(*(min(1.0, share * activations * size / n) for share in (shares.active, shares.first)))
        n_rows, n_first_rows = (rows // size * n for rows in (neurons.n_rows, neurons.n_first_rows))
        rows = NeuronRows(n_rows, neurons.n_columns, n_first_rows, n)
        return Half(tuple(replace(each, n_rows=n) for each in by_neuron), rows, own)

    return tuple(each for each in products if each not in by_neuron), half(n_hot, taken), half(size - n_hot, 1 - taken)


def crossing_values(neurons: NeuronRows, placement: str, *, is_predicted: bool) -> int:
    """What a token takes to the CPU: the FFN's input, and a predictor's scores of the CPU's neurons."""
    n_cold = neurons.n_neurons - hot_neurons(neurons.n_neurons, placement)
    return neurons.n_columns + n_cold * is_predicted
