"""Plan: a place for every part of a model, and what is expected of it. Readable JSON, reusable, hashed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hetero_ee.errors import UsageError
from hetero_ee.planning.memory import MemoryTerm
from hetero_ee_profiles.records import read_record, to_json, write_record

PLAN_VERSION = 1
PART_PLACES = ("gpu", "cpu", "stream", "visit", "disk")


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """decode_place, prefill_place: "gpu" (weights stay there), "cpu", "stream" (weights wait in RAM, the GPU computes),
    "visit" (the same for a prompt alone, keys and values come along) or "disk" (mapped, read when used). Seconds: of
    one row, and of a chunk of the prompt.
    """

    name: str
    layer: int | None
    weight_bytes: int
    kv_bytes: int
    decode_place: str
    prefill_place: str
    decode_s: float
    prefill_s: float

    def __post_init__(self) -> None:
        for place in (self.decode_place, self.prefill_place):
            if place not in PART_PLACES:
                raise ValueError(f"place is {place[:40]!r}, expected one of {', '.join(PART_PLACES)}")
        if min(self.weight_bytes, self.kv_bytes, self.decode_s, self.prefill_s) < 0:
            raise ValueError("bytes and seconds must be 0 or more")


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """Seconds that one thing takes of a pass."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """context_tokens: the length that the rates hold for. ceiling: the rate if reading the weights were all.

    rows_per_pass, tokens_per_pass: of a verification, 1 in full mode. request_s: seconds of a typical request, which
    is what the planner makes least.
    """

    context_tokens: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    ceiling_tokens_per_s: float
    rows_per_pass: float
    tokens_per_pass: float
    request_s: float
    decode_terms: tuple[TimeTerm, ...]
    prefill_terms: tuple[TimeTerm, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """model: the architecture and what its shapes hash to. boundary: layers before the exit, None in full mode.

    reasons: one sentence for each decision, for people.
    """

    version: int
    model: str
    shapes_sha256: str
    hardware: str
    hardware_kind: str
    threads: int
    context_tokens: int
    kv_type: str
    mode: str
    boundary: int | None
    draft_tokens: int
    prefill_chunk_tokens: int
    vram_budget_bytes: int
    ram_budget_bytes: int
    parts: tuple[PlacedPart, ...]
    memory: tuple[MemoryTerm, ...]
    prediction: Prediction
    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise ValueError(f"it has plan version {self.version}, this engine reads version {PLAN_VERSION}")

    @property
    def sha256(self) -> str:
        """Identifies the plan in results; two plans are the same exactly where this is."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()

    def n_bytes(self, device: str) -> int:
        """Memory of all terms on the device."""
        return sum(term.n_bytes for term in self.memory if term.device == device)

    @property
    def gpu_layers(self) -> int:
        """Layers that lie on the GPU whole."""
        on_gpu = [part.layer for part in self.parts if part.layer is not None and part.decode_place == "gpu"]
        return sum(on_gpu.count(layer) == 2 for layer in set(on_gpu))

    def save(self, file: Path) -> None:
        """Writes the plan as JSON, whole or not at all. Raises OSError."""
        write_record(self, file)

    @classmethod
    def load(cls, file: Path) -> "Plan":
        """Reads what `save` wrote. Raises UsageError naming what is wrong with it."""
        try:
            return read_record(cls, file)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the plan {file} can't be used ({error}); make one with hetero-ee plan --json."
            ) from error
