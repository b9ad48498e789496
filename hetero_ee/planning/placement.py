"""Placement: which device computes a part of the model, and where its weights are kept."""

from typing import ClassVar, Self

from hetero_ee.weights.sections import MAX_SECTIONS

HOT, COLD = "hot-", "disk-"


class Placement(str):
    """A placement in the text form that plan files and overrides use.

    - "gpu": the weights stay on the GPU.
    - "cpu": the CPU reads them from RAM.
    - "stream": they stay in RAM and are copied to the GPU at each use.
    - "visit": like "stream", but only for prompts; the KV cache of the part is copied too.
    - "disk": the CPU reads them from a mapped file at each use.
    - "hot-N": the GPU has the first N sections of a sparse FFN's neurons or N/32 of a mixture's experts, those used
      most often, and the CPU has the others. Both compute at once. "hot-0" leaves the GPU a mixture's router and shared
      expert. Source: PowerInfer (arXiv 2312.12456), with sections in place of single neurons.
    - "disk-N": like "hot-N" of experts, but the CPU reads its experts from a mapped file at each use.

    Raises:
        ValueError: for any other text.
    """

    __slots__ = ()
    GPU: ClassVar["Placement"]
    CPU: ClassVar["Placement"]
    STREAM: ClassVar["Placement"]
    VISIT: ClassVar["Placement"]
    DISK: ClassVar["Placement"]

    def __new__(cls, text: str) -> Self:
        if text not in TEXTS:
            raise ValueError(f"placement is {text[:40]!r}, expected gpu, cpu, stream, disk, visit, hot-N or disk-N")
        return super().__new__(cls, text)

    @classmethod
    def hot(cls, n_sections: int) -> Self:
        """Return the "hot-N" placement with n_sections on the GPU."""
        return cls(f"{HOT}{n_sections}")

    @property
    def in_ram(self) -> "Placement":
        """The placement with weights in RAM in place of those read from the disk."""
        return Placement.CPU if self == "disk" else Placement(self.replace(COLD, HOT))

    @property
    def from_disk(self) -> "Placement":
        """The placement with weights read from the disk in place of those in RAM."""
        return Placement.DISK if self == "cpu" else Placement(self.replace(HOT, COLD))

    @property
    def reads_disk(self) -> bool:
        """Whether the CPU reads weights of the part from the disk."""
        return self[0] == "d"

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU computes the part, or most steps of a split FFN."""
        return self not in ("cpu", "disk")

    @property
    def uses_cpu(self) -> bool:
        """Whether the CPU computes the part, or some of its neurons."""
        return not self.on_gpu or self.is_split

    @property
    def is_streamed(self) -> bool:
        """Whether the weights are copied to the GPU at each use."""
        return self in ("stream", "visit")

    @property
    def is_split(self) -> bool:
        """Whether this is a "hot-N" or "disk-N" placement, in which both devices compute neurons or experts."""
        return "-" in self

    @property
    def n_sections(self) -> int:
        """Number of sections on the GPU; 0 for placements that are not split."""
        return int(self.rpartition("-")[2]) if self.is_split else 0

    @property
    def prefill_choices(self) -> "tuple[Placement, ...]":
        """Placements that prefill may use if decoding uses this one. The KV cache must stay on the same device.

        A sparse FFN that is split always visits, see Part.prefill_choices.
        """
        return (self, Placement.VISIT) if self == "cpu" or self[0] == "h" else (self,)


WHOLE = ("gpu", "cpu", "stream", "visit", "disk")
TEXTS = frozenset((*WHOLE, *(f"{split}{n}" for split in (HOT, COLD) for n in range(MAX_SECTIONS))))
SPLITS = tuple(Placement.hot(n) for n in range(MAX_SECTIONS))
Placement.GPU, Placement.CPU, Placement.STREAM, Placement.VISIT, Placement.DISK = map(Placement, WHOLE)
