"""Placement: which device computes a part of the model, and where its weights are kept."""

from typing import ClassVar, Self

from hetero_ee.weights.sections import MAX_SECTIONS, section_neurons

HOT = "hot-"
LEVELS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 26)  # sections that the planner tries: more gain little and take longer


class Placement(str):
    """A placement in the text form that plan files and overrides use.

    - "gpu": the weights stay on the GPU.
    - "cpu": the CPU reads them from RAM.
    - "stream": they stay in RAM and are copied to the GPU at each use.
    - "visit": like "stream", but only for prompts; the KV cache of the part is copied too.
    - "disk": the CPU reads them from a mapped file at each use.
    - "hot-N": the GPU has the first N sections of a sparse FFN's neurons, which are active often, and the CPU has the
      others. Both compute at once. Source: PowerInfer (arXiv 2312.12456), with sections in place of single neurons.

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
            raise ValueError(f"placement is {text[:40]!r}, expected gpu, cpu, stream, disk, visit or hot-N")
        return super().__new__(cls, text)

    @classmethod
    def hot(cls, n_sections: int) -> Self:
        """Return the "hot-N" placement with n_sections on the GPU."""
        return cls(f"{HOT}{n_sections}")

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
    def needs_buffers(self) -> bool:
        """Whether the weights are copied to the GPU at each use, or at least for prompts."""
        return self not in ("gpu", "cpu", "disk")

    @property
    def is_split(self) -> bool:
        """Whether this is a "hot-N" placement, in which both devices compute neurons of an FFN."""
        return self[0] == "h"

    @property
    def prefill_choices(self) -> "tuple[Placement, ...]":
        """Placements that prefill may use if decoding uses this one. The KV cache must stay on the same device."""
        if self.is_split:
            return (Placement.VISIT,)
        return (self, Placement.VISIT) if self == "cpu" else (self,)

    def hot_neurons(self, n_neurons: int) -> int:
        """Return how many of the FFN's n_neurons are on the GPU; 0 for placements that are not "hot-N"."""
        return int(self.removeprefix(HOT)) * section_neurons(n_neurons) if self.is_split else 0


WHOLE = ("gpu", "cpu", "stream", "visit", "disk")
TEXTS = frozenset((*WHOLE, *(f"{HOT}{n}" for n in range(1, MAX_SECTIONS))))
SPLITS = tuple(Placement.hot(n) for n in range(1, MAX_SECTIONS))
Placement.GPU, Placement.CPU, Placement.STREAM, Placement.VISIT, Placement.DISK = map(Placement, WHOLE)


def splits(n_neurons: int, *, every: bool = False) -> list[Placement]:
    """Return an FFN's "hot-N" placements that leave neurons for both devices: all if `every`, else N in LEVELS."""
    found = SPLITS if every else [SPLITS[n - 1] for n in LEVELS]
    return [placement for placement in found if placement.hot_neurons(n_neurons) < n_neurons]
