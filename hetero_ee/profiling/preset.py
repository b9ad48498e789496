"""How much of a machine is measured: quickly, or in full."""

from dataclasses import dataclass

from hetero_ee_profiles.gpu.probe import Sampling


@dataclass(frozen=True, slots=True)
class Preset:
    """What is measured: rows of products, (rows, context) of attention, how often.

    cycle_bytes: weights that products take turns over; link_bytes: of one large copy between CPU and GPU. On a GPU, at
    rest until then, samples begin after warm_up_s, and those of one figure take no longer than gpu_sample_s. Passes on
    the CPU are repeated for pass_sample_s at each (rows, context), and less where all of the CPU's figures, the making
    of weights with them, would take longer than cpu_budget_s (see pass_sampling).
    """

    rows: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    repeats: int
    cycle_bytes: int
    link_bytes: int
    warm_up_s: float
    gpu_sample_s: float
    pass_sample_s: float
    cpu_budget_s: float

    @property
    def gpu_sampling(self) -> Sampling:
        return Sampling(self.repeats, self.gpu_sample_s)


QUICK = Preset(
    rows=(1, 4, 128),
    attention=((1, 16), (1, 1024), (128, 128), (128, 1024)),
    repeats=3,
    cycle_bytes=2**28,
    link_bytes=2**25,
    warm_up_s=0.1,
    gpu_sample_s=0.02,
    pass_sample_s=0.2,
    cpu_budget_s=2.0,
)
FULL = Preset(
    rows=(1, 2, 4, 8, 16, 128, 512),
    attention=((1, 16), (1, 256), (1, 1024), (1, 4096), (16, 1024), (128, 128), (128, 1024), (512, 512), (512, 2048)),
    repeats=7,
    cycle_bytes=2**30,
    link_bytes=2**28,
    warm_up_s=0.5,
    gpu_sample_s=1.0,
    pass_sample_s=0.5,
    cpu_budget_s=150.0,
)
