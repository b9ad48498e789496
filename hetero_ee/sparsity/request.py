"""The caller's request for activation sparsity, checked before anything is loaded."""

from dataclasses import dataclass
from typing import Self

from hetero_ee.errors import UsageError, shown
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MODEL_OPTIONS

EXACT, AUTO = "exact", "auto"
DENSE = "dense"  # neuron-major without leaving neurons out, to calibrate which may be
PREDICTED = "predicted"  # like EXACT, but neurons that a predictor calls inactive are not even computed
UNPREDICTED = "unpredicted"  # in the layout of PREDICTED without predictions, to calibrate the predictor
LARGEST_SHARE = 0.95  # largest share of neurons to skip
ZERO_ACTIVATIONS = ("relu", "fatrelu")  # activations that make most neurons exactly 0


@dataclass(frozen=True, slots=True)
class SparsityRequest:
    """Requested share of neurons to skip: 0 with EXACT, which skips only neurons that are 0; None with AUTO."""

    share: float | None
    is_dense: bool = False  # only neurons that are 0 are left out
    first_in_rows: bool = False  # in the layout of PREDICTED

    @classmethod
    def parsed(cls, asked: str | float | None) -> Self | None:
        """Parse EXACT, AUTO, DENSE, PREDICTED, UNPREDICTED or a share. None requests FFNs that are not neuron-major.

        Raises: UsageError: for any other value.
        """
        if asked is None:
            return None
        if asked == EXACT:
            return cls(0.0)
        if asked == DENSE:
            return cls(0.0, is_dense=True)
        if asked == AUTO:
            return cls(None)
        if asked in (PREDICTED, UNPREDICTED):
            return cls(0.0, is_dense=asked == UNPREDICTED, first_in_rows=True)
        try:
            share = float(asked)
        except (TypeError, ValueError):
            share = -1.0
        if isinstance(asked, bool) or not 0 < share <= LARGEST_SHARE:
            raise UsageError(
                MODEL_OPTIONS["sparsity"],
                f" is {shown(asked)}; expected {EXACT}, {PREDICTED}, {AUTO}, or the share of neurons to leave "
                f"out, above 0 and at most {LARGEST_SHARE}.",
            )
        return cls(share)

    @property
    def is_exact(self) -> bool:
        return self.share == 0

    @property
    def is_predicted(self) -> bool:
        return self.first_in_rows and not self.is_dense

    def check(self, spec: ModelSpec) -> None:
        """Check that the model has neurons that can be skipped. Raises: UsageError: if it has none."""
        check_layout(spec)
        if self.is_exact and (self.first_in_rows or not self.is_dense) and spec.activation not in ZERO_ACTIVATIONS:
            raise UsageError(
                f"{spec.architecture} has no neurons that are exactly 0 ({spec.activation}); give the share of neurons "
                "to leave out, as in ",
                MODEL_OPTIONS["sparsity"],
                " 0.4.",
            )


def check_layout(spec: ModelSpec) -> None:
    """Check that the model's FFNs can be stored neuron by neuron. Raises: UsageError: if its layers differ."""
    if any(own is not None for own in spec.own_layers):
        option = MODEL_OPTIONS["sparsity"]
        raise UsageError(
            f"the layers of {spec.architecture} differ, so their neurons can't be skipped; drop ", option, "."
        )
