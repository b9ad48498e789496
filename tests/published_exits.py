"""Exit rates published for Llama-2-7B-chat, as statistics to plan with."""

from itertools import accumulate

from hetero_ee.planning.statistics import DepthStatistics, ExitRates, ExitStatistics

# Llama-2-7B-chat, 25 K tokens per layer: the layer before the exit, the share of tokens (percent) whose argmax there is
# the final token and among the draft's four, and precision and recall of a trained predictor at threshold 0.5.
# Source: the independent replication of SpecEE in w28ahmad/EarlyExitLLM.
PUBLISHED_LAYERS = 32
PUBLISHED_RATES = (
    (10, 3.3, 0.34, 0.98),
    (15, 9.7, 0.44, 0.94),
    (17, 24.2, 0.65, 0.88),
    (19, 32.6, 0.71, 0.82),
    (21, 40.9, 0.74, 0.85),
    (24, 52.1, 0.82, 0.81),
    (26, 61.8, 0.88, 0.82),
    (28, 73.8, 0.93, 0.83),
    (30, 85.7, 0.98, 0.85),
)


SPECEE_LAYERS = (15, 16, 17, 19, 21, 24, 26, 28)  # after which SpecEE judges Llama-2-7B's tokens, by its code


def published_depths(n_layers: int, risk: float) -> tuple[DepthStatistics, ...]:
    """Return depth statistics for early-exit modes, derived from published_statistics.

    For mode specee, a token that exits at one layer is assumed to exit at all later ones. Mode certified gets an entry
    for each exit layer whose share of wrong exits is within the risk."""
    known = published_statistics(n_layers)
    places = sorted({round((layer + 1) * n_layers / PUBLISHED_LAYERS) for layer in SPECEE_LAYERS})
    exit_layers = tuple(place for place in places if 0 < place < n_layers)
    exited = [*accumulate((known.rates_at(layer).exit_rate for layer in exit_layers), max)]
    shares = tuple(share - before for before, share in zip([0.0, *exited], exited, strict=False))
    certified = (
        DepthStatistics("certified", known.source, (layer,), (rates.exit_rate,))
        for layer, rates in known.rates.items()
        if rates.exit_rate * (1 - rates.precision) <= risk
    )
    return (DepthStatistics("specee", known.source, exit_layers, shares, is_partial=True), *certified)


def published_statistics(n_layers: int) -> ExitStatistics:
    """Return the published rates of Llama-2-7B-chat, scaled to the depth of a model with n_layers layers."""
    rates: dict[int, ExitRates] = {}
    for layer, oracle_percent, precision, recall in PUBLISHED_RATES:
        exit_layer = round((layer + 1) * n_layers / PUBLISHED_LAYERS)
        if 0 < exit_layer < n_layers:
            # A share `recall` of the right tokens exit, and they are a share `precision` of all that do.
            right = oracle_percent / 100
            exit_rate = min(1.0, right * recall / precision)
            refused = min(1.0, max(0.0, (right - exit_rate * precision) / (1 - exit_rate))) if exit_rate < 1 else 0.0
            rates[exit_layer] = ExitRates(exit_rate, precision, refused)
    source = "published rates of Llama-2-7B-chat (w28ahmad/EarlyExitLLM), scaled by depth"
    return ExitStatistics(source, n_layers, rates)
