"""Exit heads: judge a token at one exit layer with an exit map, a predictor and its threshold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.exits.calibration import NO_EXIT, Calibration, FittedExitLayer
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
    def of(cls, fitted: FittedExitLayer, *, compiled: bool) -> "ExitHead":
        end, partial = exit_end(fitted, compiled=compiled), fitted.partial_predictor
        later = None if partial is None else ExitConfidence(partial, compiled=compiled)
        assert isinstance(end.judge, ExitConfidence), "exit_end makes it"
        return cls(end, end.judge, fitted.threshold, later, fitted.partial_threshold)


ExitHeads = Mapping[int, ExitHead]  # by exit layer, ascending


def exit_end(fitted: FittedExitLayer, *, compiled: bool) -> DraftEnd:
    """Return the end that chooses drafts at a fitted exit layer. If compiled, its map is packed in kernels' tiles."""
    state_map = None if fitted.exit_map is None else fitted.exit_map.packed(compiled=compiled)
    return DraftEnd(state_map=state_map, judge=ExitConfidence(fitted.predictor, compiled=compiled))


def exit_heads(calibration: Calibration, exit_layers: Iterable[int], *, compiled: bool) -> ExitHeads:
    return {layer: ExitHead.of(calibration.at(layer), compiled=compiled) for layer in sorted(exit_layers)}
