"""Certificates of early exits: exits measured on prompts that nothing was fitted to, and the thresholds they allow.

The unit is the prompt, since tokens of one sequence depend on each other. The loss of a prompt is the share of its
judged tokens that exit and differ from the full model's choice, along the full model's own continuation.
`certified_exit` finds the lowest confidence at which tokens may exit. With confidence 1 - delta over the draw of the
measured prompts, the mean loss of prompts from the same distribution is then at most `risk`.

Proof (learn then test, Angelopoulos et al., arXiv 2110.01052): for one set S of exit layers, thresholds are tested in a
fixed order, strict to loose, up to the first that is not rejected. Each test is valid at level delta_S (risk_bound.py).
The first threshold in this order whose mean loss is above the risk is accepted with a chance of at most delta_S, and
the thresholds after it are only reached through it. The caller may choose any set, even after reading the certificate:
the levels delta_S = delta / 2^|S| / C(n_exit_layers, |S|) add up to less than delta over all sets, so the chance that
any set fails is below delta (Bonferroni). The margin of a single exit layer is therefore log(2 n_exit_layers) nats,
whichever other sets exist. The promise holds for one risk at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import ACTIVATION_TERMS, CERTIFIED, MODEL_OPTIONS, PLAN_OPTIONS
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.statistics import DepthStatistics
from hetero_ee.speculation.exits.calibration import NO_EXIT
from hetero_ee.speculation.exits.risk_bound import log_purse, risk_bound

DELTA = 0.05
N_LEVELS = 128
LEVELS_A_HALVING = 8  # of the doubt 1 - confidence: the last level begins at 1 - 1.7e-5
WAY_OUT = "run hetero-ee calibrate --certify"


def level_confidence(level: int) -> float:
    """Return the lowest confidence of a level. Level 0, at which nothing exits, has confidence 0."""
    return float(1 - 2.0 ** (-level / LEVELS_A_HALVING))


def levels_of(confidences: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the highest level that each confidence reaches, 0 for NaN."""
    least = [level_confidence(level) for level in range(N_LEVELS)]
    found = np.searchsorted(least, confidences, side="right") - 1
    return np.where(np.isnan(confidences), 0, np.maximum(found, 0)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class CertifiedExit:
    """Certified exits: a token exits at the first of the exit layers where its confidence reaches the threshold."""

    exit_layers: tuple[int, ...]
    risk: float
    delta: float
    threshold: float  # NO_EXIT where not even the strictest keeps the promise
    shares: tuple[float, ...]  # share of the certificate's tokens that exit, by exit layer
    realised: float  # mean loss of the certificate's prompts
    bound: float  # on the mean loss, with the confidence that this set of exit layers is tested with; at most the risk


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Measurement, without certification, of exits after one exit layer along text that those exits produced."""

    risk: float
    exit_layer: int
    n_tokens: int  # tokens, without the first of each text
    n_exited: int
    n_changed: int  # tokens that differ from the full model's choice

    def __post_init__(self) -> None:
        if self.n_tokens < 1 or not 0 <= self.n_changed <= self.n_exited <= self.n_tokens:
            raise ValueError(f"{self.n_changed} of {self.n_exited} exits of {self.n_tokens} tokens are changed")

    @property
    def changed(self) -> float:
        """Share of all tokens that differ from the full model's choice."""
        return self.n_changed / self.n_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """Judgements of each token at each exit layer: the confidence and whether the exit was right, ordered by prompt."""

    key: str  # key of the weights
    exits_digest: str  # see Calibration.exits_digest
    kv_type: str
    text: str  # where the prompts come from, for people
    exit_layers: tuple[int, ...]  # ascending
    prompt_lengths: NDArray[np.uint16]  # (n_prompts,) tokens
    n_tokens: NDArray[np.uint16]  # (n_prompts,): judged of each, 0 where its text ended at once
    judgements: NDArray[np.uint8]  # (sum of n_tokens, n_exit_layers): level x 2, + 1 where it was right
    on_policy: tuple[OnPolicy, ...] = ()  # by risk
    activation_terms: int = 1  # see ModelSpec

    def __post_init__(self) -> None:
        shape = (int(self.n_tokens.sum()), len(self.exit_layers))
        if self.judgements.shape != shape or self.n_tokens.shape != self.prompt_lengths.shape or not shape[0]:
            raise ValueError(f"{self.judgements.shape} judgements, expected {shape}")
        if not self.exit_layers or list(self.exit_layers) != sorted(set(self.exit_layers)) or self.exit_layers[0] < 1:
            raise ValueError("exit layers have to ascend from 1")

    @property
    def n_prompts(self) -> int:
        return len(self.n_tokens)

    def require_kv_type(self, kv_type: str) -> None:
        """Check the type of keys and values. Raises: UsageError: if it differs from the certificate's type."""
        if kv_type != self.kv_type:
            raise UsageError(
                f"the certificate is of keys and values in {self.kv_type}, not {kv_type}; leave out ",
                PLAN_OPTIONS["kv_type"],
                ", or certify with that type.",
            )

    def require_activations(self, n_terms: int) -> None:
        """Check the int8 terms of activations. Raises: UsageError: if the certificate has another number of them."""
        if n_terms != self.activation_terms:
            names = {n: name for name, n in ACTIVATION_TERMS.items()}
            here, its = names[n_terms], names.get(self.activation_terms, "other")
            raise UsageError(
                f"the certificate is of {its} activations, not {here}; choose ",
                MODEL_OPTIONS["activations"],
                f" {its}, or certify with {here}.",
            )

    def depth_statistics(self, risk: float) -> tuple[DepthStatistics, ...]:
        """Return the exit depths for each single exit layer at which tokens may exit with this risk.

        Raises: UsageError: if the risk can't be certified.
        """
        source = f"the certificate on {self.n_prompts:,} prompts of {self.text}"
        found = [self.certified_exit([exit_layer], risk) for exit_layer in self.exit_layers]
        return tuple(
            DepthStatistics(CERTIFIED, source, each.exit_layers, each.shares, threshold=each.threshold)
            for each in found
            if sum(each.shares) > 0
        )

    def certified_exit(self, exit_layers: Sequence[int], risk: float, delta: float = DELTA) -> CertifiedExit:
        """Return the loosest certified threshold for exits at the first of these exit layers.

        Raises: UsageError: if the risk can't be certified.
        """
        chosen = self._checked(exit_layers)
        level_delta = delta / 2 ** len(chosen) / math.comb(len(self.exit_layers), len(chosen))
        self._check_risk(risk, level_delta)
        wrong, exits = self._by_level(chosen)
        n_tokens, level = np.maximum(self.n_tokens, 1), N_LEVELS
        while level > 1 and log_purse(wrong[level - 1] / n_tokens, risk) >= -math.log(level_delta):
            level -= 1
        if level == N_LEVELS:
            nothing = (0.0,) * len(chosen)
            return CertifiedExit(tuple(exit_layers), risk, delta, NO_EXIT, nothing, 0.0, 0.0)
        shares = tuple((exits[:, level] / len(self.judgements)).tolist())
        losses = wrong[level] / n_tokens
        realised, bound = float(losses.mean()), risk_bound(losses, level_delta)
        return CertifiedExit(tuple(exit_layers), risk, delta, level_confidence(level), shares, realised, bound)

    def _checked(self, exit_layers: Sequence[int]) -> list[int]:
        """Return the columns of these exit layers in `judgements`. Raises: UsageError: if one was not certified."""
        asked = list(exit_layers)
        if not asked or asked != sorted(set(asked)) or not set(asked) <= set(self.exit_layers):
            raise UsageError(
                f"exit layers are {shown(asked)}; expected some of {self.exit_layers[0]} to {self.exit_layers[-1]}, "
                "ascending."
            )
        return [self.exit_layers.index(each) for each in asked]

    def _check_risk(self, risk: float, level_delta: float) -> None:
        check_risk(risk)
        least = risk_bound(np.zeros(self.n_prompts), level_delta)
        if risk < least:
            raise UsageError(
                PLAN_OPTIONS["risk"],
                f" is {risk:g}, and {self.n_prompts} prompts can't certify less than {least:.4f} there; ask for "
                "that, or certify with more prompts.",
            )

    def _by_level(self, columns: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count the exits for a threshold at each level.

        A token exits at an exit layer if the threshold is above every level that it reached at earlier exit layers, and
        at most the level that it reaches at this one. Returns the wrong exits of each prompt (N_LEVELS, n_prompts), and
        all exits at each exit layer (n_columns, N_LEVELS).
        """
        prompts = np.repeat(np.arange(self.n_prompts), self.n_tokens)
        wrong = np.zeros((N_LEVELS, self.n_prompts), np.int64)
        exits = np.zeros((len(columns), N_LEVELS), np.int64)
        before = np.zeros(len(prompts), np.int64)
        for row, column in enumerate(columns):
            judged = self.judgements[:, column]
            level, is_wrong = np.maximum(judged >> 1, before), judged % 2 == 0
            for ends, sign in ((level, 1), (before, -1)):
                exits[row] += sign * np.bincount(ends, minlength=N_LEVELS)
                places = (ends * self.n_prompts + prompts)[is_wrong]
                wrong += sign * np.bincount(places, minlength=wrong.size).reshape(wrong.shape)
            before = level
        return wrong[::-1].cumsum(0)[::-1], exits[:, ::-1].cumsum(1)[:, ::-1]


def check_risk(risk: object) -> None:
    """Check the certified risk. Raises: UsageError: if it is not a share between 0 and 1."""
    if isinstance(risk, bool) or not isinstance(risk, int | float) or not 0 < risk < 1:  # false for NaN too
        raise UsageError(PLAN_OPTIONS["risk"], f" is {shown(risk)}; expected a number between 0 and 1, as 0.05.")


def check_sampling(params: SamplingParams) -> None:
    """Check that sampling is greedy, the only kind that was certified. Raises: UsageError: if it is not."""
    if params.temperature != 0 or params.changes_logits or params.is_constrained:
        raise UsageError(
            f"the certificate is of greedy texts, and temperature is {params.temperature:g}, repeat penalty "
            f"{params.repeat_penalty:g}, presence penalty {params.presence_penalty:g}, frequency penalty "
            f"{params.frequency_penalty:g}, with {len(params.logit_bias)} biases and "
            f"{'a' if params.is_constrained else 'no'} grammar; leave those out, or choose "
            "another mode."
        )
