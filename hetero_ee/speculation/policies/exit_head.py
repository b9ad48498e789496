"""Exit heads: judge a token at one exit layer with an exit map, a predictor and its threshold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.exits.calibration import NO_EXIT, Calibration, DraftedExitLayer, FittedExitLayer
from hetero_ee.speculation.exits.predictor import ExitConfidence


@dataclass(frozen=True, slots=True, eq=False)
class ExitHead:
    """Judges tokens at one exit layer. `end` leads from a state to a token and its confidence. `later` judges
    candidates that an earlier exit layer or a draft head has chosen; it is None if it was not fitted."""

    end: DraftEnd
    judge: ExitConfidence  # the end's
    threshold: float
    later: ExitConfidence | None
    later_threshold: float = NO_EXIT

    @classmethod
    def of(cls, fitted: FittedExitLayer, drafted: DraftedExitLayer | None = None, *, compiled: bool) -> "ExitHead":
        """Return the head of a fitted exit layer. `drafted` judges the candidates of a draft."""
        end = exit_end(fitted, compiled=compiled)
        partial, threshold = fitted.partial_predictor, fitted.partial_threshold
        if drafted is not None:
            partial, threshold = drafted.predictor, drafted.threshold
        later = None if partial is None else ExitConfidence(partial)
        assert isinstance(end.judge, ExitConfidence), "exit_end makes it"
        return cls(end, end.judge, fitted.threshold, later, threshold)


ExitHeads = Mapping[int, ExitHead]  # by exit layer, ascending


def exit_end(fitted: FittedExitLayer, *, compiled: bool) -> DraftEnd:
    """Return the end that chooses drafts at a fitted exit layer. If compiled, its map is packed in kernels' tiles."""
    state_map = None if fitted.exit_map is None else fitted.exit_map.packed(compiled=compiled)
    return DraftEnd(state_map=state_map, judge=ExitConfidence(fitted.predictor))


def exit_heads(
    calibration: Calibration, exit_layers: Iterable[int], *, compiled: bool, is_drafted: bool = False
) -> ExitHeads:
    """Return the heads of these exit layers. If is_drafted, they judge the candidates of the calibration's draft."""
    drafted = calibration.drafted if is_drafted else None
    found = {}
    for layer in sorted(exit_layers):
        of_draft = None if drafted is None else drafted.exit_layers[layer - 1]
        found[layer] = ExitHead.of(calibration.at(layer), of_draft, compiled=compiled)
    return found
