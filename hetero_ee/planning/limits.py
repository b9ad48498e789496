"""What the user allows and pins; the planner fills only what is unset."""

import re
from dataclasses import dataclass

from hetero_ee.costs.kv_types import KV_BYTES
from hetero_ee.errors import UsageError, shown
from hetero_ee.planning.placement import SPLITS

PLACEMENTS = ("gpu", "cpu", "stream")  # and of sparse FFNs SPLITS
CERTIFIED = "certified"
# Tokens may be given out before the last layer, unverified: named by the policy that decides. Never chosen unasked.
EARLY_EXIT_MODES = ("specee", CERTIFIED, "calm", "skipdecode", "q-exit", "patience", "joint-gate")
MODES = ("full", "exact", *EARLY_EXIT_MODES)
RISK = 0.05  # of mode certified
MAX_DRAFT_LENGTH = 16
MAX_CONTEXT_TOKENS, MAX_THREADS = 2**24, 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Raises UsageError for values that make no sense."""

    vram_budget_bytes: int | None = None  # None: what is free, less the margin
    vram_margin_bytes: int = 2**30
    ram_budget_bytes: int | None = None  # None: what is free
    # First layers, whole, on the GPU; 0: no GPU; more than there are: all; None: free. Without a GPU it means nothing.
    gpu_layers: int | None = None
    # Regular expressions and the placement ("gpu", "cpu", "stream"; "hot-N", see hot.py) of the parts whose whole names
    # they match; the first that matches counts. A part on the CPU may still be read from the disk where RAM is short.
    overrides: tuple[tuple[str, str], ...] = ()
    context_tokens: int = 0  # 0: chosen to fit, and grows when a text needs it, up to the model's own
    kv_type: str | None = None  # of KV_BYTES; None: see parts.default_kv_type
    mode: str | None = None  # of MODES; None: the planner's choice of "full" and "exact"
    draft_length: int | None = None  # most tokens of a verification, or of a catch-up; None: the planner's choice
    risk: float | None = None  # of mode certified: the share of a prompt's tokens that may differ; None: RISK
    threads: int = 0  # 0: all

    def __post_init__(self) -> None:
        for name in ("vram_budget_bytes", "ram_budget_bytes", "gpu_layers"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 0):
                raise UsageError(f"{name} is {shown(value)}; expected a whole number from 0.")
        if not is_whole(self.vram_margin_bytes, 0):
            raise UsageError(f"vram_margin_bytes is {shown(self.vram_margin_bytes)}; expected a whole number from 0.")
        for name, largest in (("context_tokens", MAX_CONTEXT_TOKENS), ("threads", MAX_THREADS)):
            if not is_whole(getattr(self, name), 0, largest):
                raise UsageError(
                    f"{name} is {shown(getattr(self, name))}; expected a whole number from 0 (automatic) to {largest}."
                )
        if self.kv_type is not None and not (isinstance(self.kv_type, str) and self.kv_type in KV_BYTES):
            raise UsageError(f"kv_type is {shown(self.kv_type)}; expected one of {', '.join(KV_BYTES)}.")
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(f"mode is {shown(self.mode)}; expected one of {', '.join(MODES)}.")
        if self.draft_length is not None and not is_whole(self.draft_length, 1, MAX_DRAFT_LENGTH):
            raise UsageError(f"draft_length is {shown(self.draft_length)}; expected 1 to {MAX_DRAFT_LENGTH}.")
        check_risk(self.mode, self.risk)
        _check_overrides(self.overrides)

    def pinned(self, name: str) -> str | None:
        """Where the overrides put the part, None where they leave it open."""
        return next((placement for pattern, placement in self.overrides if re.fullmatch(pattern, name)), None)


def is_whole(value: object, smallest: int, largest: int | None = None) -> bool:
    """Whether the value is a whole number, none of True and False, within these."""
    return type(value) is int and smallest <= value and (largest is None or value <= largest)


def check_risk(mode: str | None, risk: object) -> None:
    """Check that the risk, if given, is a share and belongs to the mode. Raises UsageError."""
    if risk is not None:
        is_share = isinstance(risk, int | float) and not isinstance(risk, bool) and 0 < risk < 1  # false for NaN
        if not is_share:
            raise UsageError(f"risk is {shown(risk)}; expected a share of tokens above 0 and below 1, like {RISK}.")
        if mode != CERTIFIED:
            raise UsageError(f"risk is of mode {CERTIFIED} and the mode is {mode or 'not given'}; drop risk.")


def parse_override(text: str) -> tuple[str, str]:
    """`REGEX=PLACEMENT` as the command line takes it. Raises UsageError."""
    pattern, equals, placement = text.rpartition("=")
    if not equals:
        raise UsageError(f"override {shown(text)} has no '='; expected REGEX=gpu, =cpu, =stream or =hot-N.")
    _check_override(pattern, placement)
    return pattern, placement


def _check_overrides(overrides: object) -> None:
    if not isinstance(overrides, tuple):
        raise UsageError(f"overrides is {shown(overrides)}; expected a tuple of pairs (regular expression, placement).")
    for pair in overrides:
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise UsageError(f"override {shown(pair)} is no pair of strings; expected (regular expression, placement).")
        _check_override(*pair)


def _check_override(pattern: str, placement: str) -> None:
    if placement not in (*PLACEMENTS, *SPLITS):
        raise UsageError(
            f"override {shown(f'{pattern}={placement}')} names no placement; expected one of {', '.join(PLACEMENTS)}, "
            f"or {SPLITS[0]} to {SPLITS[-1]} of a sparse FFN."
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"override {shown(pattern)} is no regular expression ({error}).") from error
