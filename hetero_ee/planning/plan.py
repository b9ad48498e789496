"""Plan: a placement for every part of a model, and the expected speed, saved as JSON."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from hetero_ee.errors import UsageError, shown
from hetero_ee.layers.state import KV_BYTES, MAX_DECODE_TOKENS
from hetero_ee.options.engine import (
    CERTIFIED,
    EARLY_EXIT_MODES,
    MAX_CONTEXT_TOKENS,
    MAX_DRAFT_LENGTH,
    MAX_SEQUENCES,
    MAX_THREADS,
    MAX_TREE_WIDTH,
    MODES,
    N_SEQUENCES,
)
from hetero_ee.options.option import is_whole
from hetero_ee.planning.limits import check_risk
from hetero_ee.planning.parts import layer_placements
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.memory import DRAFT_HEAD, DRAFT_MODEL, SNAPSHOTS, MemoryTerm
from hetero_ee_profiles.records import read_record, write_record

PLAN_VERSION = 7
LAZY = "lazy"  # how skipped layers get their keys and values; part of what files and hashes of plans say
EXIT, SEQUENCE = "exit", "sequence"  # source of drafts: early exits, or a draft sequence from elsewhere
DEVICES = ("gpu", "cpu", "disk")
DECIDED = (
    *("shapes_sha256", "threads", "context_tokens", "kv_type", "mode", "drafts", "exit_layer", "draft_length"),
    *("prefill_chunk_tokens", "ram_budget_bytes"),
)  # two plans are the same if these are, and the placements and, with a GPU, the VRAM budget
OUTER_PLACEMENTS = (Placement.GPU, Placement.CPU, Placement.DISK)  # of embedding and head


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part of the model with its placements, bytes and expected seconds."""

    name: str
    layer: int | None
    weight_bytes: int
    kv_bytes: int
    decode_placement: Placement
    prefill_placement: Placement
    decode_s: float  # of one token
    prefill_s: float  # of a chunk of the prompt

    def __post_init__(self) -> None:
        for name in ("decode_placement", "prefill_placement"):  # text, as in plan files and overrides, is read too
            object.__setattr__(self, name, Placement(getattr(self, name)))
        if min(self.weight_bytes, self.kv_bytes, self.decode_s, self.prefill_s) < 0:
            raise ValueError("bytes and seconds must be 0 or more")

    @property
    def kind(self) -> str:
        """Name of the part within its layer, such as "attention" or "ffn"."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One summand of a pass's expected seconds, such as "ffn on the GPU"."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BytesTerm:
    """Bytes of one kind that are moved per token, on average."""

    name: str
    n_bytes: float


@dataclass(frozen=True, slots=True)
class Prediction:
    context_tokens: int  # for which the rates hold
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    ceiling_tokens_per_s: float  # if reading weights were the only cost
    batch_per_pass: float  # tokens in a verification, or in a pass of the last layers; 1 in full mode
    tokens_per_pass: float  # tokens generated per such pass; 1 in full mode
    cpu_tokens_per_s: float | None  # of the CPU in full mode; None if its memory is too small
    other_mode_tokens_per_s: float | None  # of this split in full mode, or for a full-mode plan in the best exact mode
    first_token_s: float  # of a typical prompt
    request_s: float  # of a typical request: what the planner minimizes
    decode_terms: tuple[TimeTerm, ...]
    prefill_terms: tuple[TimeTerm, ...]
    layer_terms: tuple[TimeTerm, ...]  # seconds of an average layer for one token, by device
    mean_depth: float | None = None  # layers run per token of an early-exit mode; None if unknown

    moved_terms: tuple[BytesTerm, ...] = ()  # of a token: over the link, and out of the CPU's memory

    ADDED_FIELDS: ClassVar = ("mean_depth", "moved_terms")  # may be missing in files of this version


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model runs on a machine: placements, mode, context and budgets.

    Raises:
        UsageError: if values contradict each other.
    """

    version: int
    model: str  # its architecture
    shapes_sha256: str
    hardware: str
    hardware_kind: str
    threads: int
    context_tokens: int
    kv_type: str
    mode: str
    drafts: str | None  # EXIT or SEQUENCE; None except in exact mode
    exit_layer: int | None  # layers before the exit, 0 for a draft sequence; None except in exact mode
    draft_length: int  # maximum tokens of a verification, or of a catch-up in an early-exit mode
    prefill_chunk_tokens: int
    vram_budget_bytes: int
    ram_budget_bytes: int
    parts: tuple[PlacedPart, ...]
    memory: tuple[MemoryTerm, ...]
    prediction: Prediction
    reasons: tuple[str, ...]  # a sentence for each decision, for people
    name: str | None = None  # of the model, as the user typed it
    exit_layers: tuple[int, ...] = ()  # where an early-exit mode judges tokens, ascending; (): chosen by its policy
    risk: float | None = None  # of mode certified
    # Chunks of a prompt with fewer tokens use the placements for decoding. None: those of MAX_DECODE_TOKENS or fewer.
    prefill_least_tokens: int | None = None
    n_sequences: int = N_SEQUENCES  # for whose states memory is counted
    tree_width: int = 1  # most drafts after the same token; 1 for chains
    checksum: str | None = field(default=None, compare=False)  # in files: of all other fields; None in older ones

    ADDED_FIELDS: ClassVar = (
        "exit_layers",
        "risk",
        "prefill_least_tokens",
        "n_sequences",
        "tree_width",
        "checksum",
    )  # may be missing in files of this version
    # Fields of older files, with the values that mean what plans mean now.
    REMOVED_FIELDS: ClassVar = {"exit_kv": (None, LAZY)}

    def __post_init__(self) -> None:
        self.check_version(self.version)
        _check_numbers(self)
        _check_drafts(self)
        _check_exits(self)
        _check_parts(self.parts)
        _check_memory(self)

    def __repr__(self) -> str:
        n_layers = len({part.layer for part in self.parts} - {None})
        return (
            f"<Plan {self.sha256[:12]}: {self.model} on {self.hardware}, {self.gpu_layers} of {n_layers} layers on the "
            f"GPU, {self.mode} mode, context {self.context_tokens}, {self.prediction.generated_tokens_per_s:.1f} "
            "tokens/s expected>"
        )

    @staticmethod
    def check_version(version: int) -> None:
        """Check that this engine reads plans of this version. Raises: UsageError: if not."""
        if version != PLAN_VERSION:
            raise UsageError(
                f"it has plan version {shown(version)}, this engine reads version {PLAN_VERSION}; make a new plan"
            )

    @property
    def sha256(self) -> str:
        """SHA-256 of the plan's decisions and budgets, without times and texts. Results name the plan by it."""
        placed = [(part.name, part.decode_placement, part.prefill_placement) for part in self.parts]
        vram_budget_bytes = self.vram_budget_bytes if self.n_bytes("gpu") else 0
        decided = [placed, vram_budget_bytes, *(getattr(self, name) for name in DECIDED)]
        if self.draft_device == "gpu":
            decided.append(DRAFT_HEAD)
        if self.mode in EARLY_EXIT_MODES:
            decided += [self.exit_layers, self.risk, LAZY]
        if self.prefill_least_tokens is not None:
            decided.append(self.prefill_least_tokens)
        if self.n_sequences != N_SEQUENCES:
            decided.append(("n_sequences", self.n_sequences))
        if self.tree_width != 1:
            decided.append(("tree_width", self.tree_width))
        return hashlib.sha256(json.dumps(decided).encode()).hexdigest()

    @property
    def sealed(self) -> "Plan":
        """A copy with its checksum, from which `load` sees whether the file was edited."""
        values = asdict(replace(self, checksum=None), dict_factory=_stated)
        return replace(self, checksum=hashlib.sha256(json.dumps(values).encode()).hexdigest())

    def n_bytes(self, device: str) -> int:
        """Return the bytes of memory planned on the device."""
        return sum(term.n_bytes for term in self.memory if term.device == device)

    @property
    def disk_weight_bytes(self) -> int:
        """Weights that RAM has no room for, which are read from the disk at each use."""
        return sum(term.n_bytes for term in self.memory if (term.device, term.name) == ("disk", "weights"))

    @property
    def snapshot_bytes(self) -> int:
        """RAM for snapshots, see KvCache.mark."""
        return sum(term.n_bytes for term in self.memory if term.name == SNAPSHOTS)

    @property
    def draft_device(self) -> str | None:
        """Device that computes draft sequences, None if no memory is planned for them."""
        return next((term.device for term in self.memory if term.name in (DRAFT_HEAD, DRAFT_MODEL)), None)

    def prefills(self, n_tokens: int) -> bool:
        """Return whether a pass of n_tokens uses the placements for prompts."""
        return n_tokens >= (self.prefill_least_tokens or MAX_DECODE_TOKENS + 1)

    @property
    def decode_placements(self) -> tuple[Placement, ...]:
        return tuple(part.decode_placement for part in self.parts)

    @property
    def gpu_layers(self) -> int:
        return layer_placements(self.parts, self.decode_placements).count({Placement.GPU})

    def save(self, file: Path) -> None:
        """Write the plan as JSON, completely or not at all. Raises: OSError: if that fails."""
        write_record(self.sealed, file)

    @classmethod
    def load(cls, file: Path) -> "Plan":
        """Read a plan that `save` wrote. Raises: UsageError: names the problem."""
        try:
            found = read_record(cls, file)
            if found.checksum not in (None, found.sealed.checksum):
                raise ValueError("it was changed after it was made")
        except (OSError, ValueError) as error:
            problem = str(error).removeprefix("it: ").split("; ")[0]  # of two ways out this one
            raise UsageError(
                f"the plan {file} can't be used ({problem}); make one with hetero-ee plan --json."
            ) from error
        return found


def _stated(values: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that say something, so that fields added later leave the checksums of older files valid."""
    return {
        name: value
        for name, value in values
        if value not in (None, ()) and (name, value) not in (("n_sequences", N_SEQUENCES), ("tree_width", 1))
    }


def _check_numbers(made: Plan) -> None:
    for name, smallest, largest in (
        ("threads", 1, MAX_THREADS),
        ("context_tokens", 1, MAX_CONTEXT_TOKENS),
        ("draft_length", 1, MAX_DRAFT_LENGTH),
        ("tree_width", 1, MAX_TREE_WIDTH),
        ("prefill_least_tokens", MAX_DECODE_TOKENS + 1, MAX_CONTEXT_TOKENS),
        ("prefill_chunk_tokens", 1, MAX_CONTEXT_TOKENS),
        ("n_sequences", 1, MAX_SEQUENCES),
        ("vram_budget_bytes", 0, None),
        ("ram_budget_bytes", 0, None),
    ):
        value = getattr(made, name)
        if not is_whole(value, smallest, largest) and not (value is None and name == "prefill_least_tokens"):
            to = "" if largest is None else f" to {largest}"
            raise UsageError(f"{name} is {shown(value)}, expected a whole number from {smallest}{to}; plan again")
    for name, choices in (("kv_type", tuple(KV_BYTES)), ("mode", MODES)):
        if getattr(made, name) not in choices:
            raise UsageError(
                f"{name} is {shown(getattr(made, name))}, expected one of {', '.join(choices)}; plan again"
            )


def _check_drafts(made: Plan) -> None:
    """Check that only exact mode has drafts, and that the exit layer suits them: 0 for sequences, else 1 or more.

    Whether the model has that exit layer is checked by check_fits.
    """
    exit_layer = made.exit_layer
    goes_with = {
        None: made.mode != "exact" and exit_layer is None,
        EXIT: made.mode == "exact" and is_whole(exit_layer, 1),
        SEQUENCE: made.mode == "exact" and is_whole(exit_layer, 0, 0),
    }
    if made.drafts not in tuple(goes_with):
        raise UsageError(f"drafts is {shown(made.drafts)}, expected {EXIT}, {SEQUENCE} or nothing; plan again")
    if not goes_with[made.drafts]:
        raise UsageError(
            f"mode {shown(made.mode)} does not go with drafts {shown(made.drafts)} and exit layer {shown(exit_layer)}; "
            "plan again"
        )


def _check_exits(made: Plan) -> None:
    """Check that only early-exit modes have exit layers, and only mode certified has a risk."""
    layers, is_early = made.exit_layers, made.mode in EARLY_EXIT_MODES
    ascend = all(is_whole(layer, 1 + before) for before, layer in zip((0, *layers), layers, strict=False))
    if not ascend or (layers and not is_early):
        raise UsageError(
            f"mode {shown(made.mode)} does not go with exit layers {shown(layers)}: they ascend from 1 in early-exit "
            "modes and are none in others; plan again"
        )
    if (made.mode == CERTIFIED) != (made.risk is not None):
        raise UsageError(f"mode {shown(made.mode)} does not go with risk {shown(made.risk)}; plan again")
    check_risk(made.mode, made.risk)


def _check_parts(parts: tuple[PlacedPart, ...]) -> None:
    """Check that each part occurs once, with a possible placement. Missing parts are found by check_fits."""
    names: set[str] = set()
    for part in parts:
        if part.name in names:
            raise UsageError(f"part {shown(part.name)} occurs twice; plan again")
        names.add(part.name)
        decode, prefill = part.decode_placement, part.prefill_placement
        fits = decode != Placement.VISIT and prefill in decode.prefill_choices
        if part.layer is None:
            fits = prefill == decode in OUTER_PLACEMENTS
        if not fits:
            raise UsageError(
                f"part {shown(part.name)} can't be on {str(decode)!r} for tokens and {str(prefill)!r} for prompts; "
                "plan again"
            )


def _check_memory(made: Plan) -> None:
    for term in made.memory:
        if term.device not in DEVICES or not is_whole(term.n_bytes, 0):
            raise UsageError(
                f"memory {shown(term.name)} is {shown(term.n_bytes)} bytes on {shown(term.device)}, expected 0 or more "
                f"on {', '.join(DEVICES)}; plan again"
            )
    for device, budget_bytes in (("gpu", made.vram_budget_bytes), ("cpu", made.ram_budget_bytes)):
        if made.n_bytes(device) > budget_bytes:
            raise UsageError(
                f"it takes {made.n_bytes(device)} bytes of the {device}'s memory and its budget is {budget_bytes}; "
                "plan again"
            )
    computes_on_gpu = [p.name for p in made.parts if p.decode_placement.on_gpu or p.prefill_placement.on_gpu]
    if computes_on_gpu and not made.n_bytes("gpu"):
        raise UsageError(f"part {shown(computes_on_gpu[0])} needs a GPU and no memory is planned there; plan again")
