"""Choose how many bits a model's matrices get on a machine, by the speeds that the planner expects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.context import USUAL_TOKENS
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.quality.bits import dealt_layouts, layer_matrices, least_bytes
from hetero_ee_profiles.hardware import HardwareProfile

BITS = (4.5, 4.6, 4.8, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 8.5)
FAST = 0.95  # of the highest speed: more bits that keep it cost next to nothing


@dataclass(frozen=True, slots=True)
class Size:
    """Bits per weight of the layers' matrices, scales included, and what the planner expects of the model with them."""

    bits: float
    n_bytes: int  # of all weights
    tokens_per_s: float
    is_on_gpu: bool  # wholly, with USUAL_TOKENS of context


def sizes(spec: ModelSpec, profile: HardwareProfile) -> Iterator[Size]:
    """Yield the sizes that the machine's memory holds, the smallest first. Raises: UsageError: if it holds none."""
    plain = spec.in_plain_int4
    limits = Limits(context_tokens=min(USUAL_TOKENS, spec.max_context_tokens))
    matrices = layer_matrices(spec)
    alike = {each: float(each.n_elements) for each in matrices}
    n_weights = sum(each.n_elements for each in matrices)
    least = ceil(800 * least_bytes(matrices) / n_weights) / 100  # more than BITS[0] if tiles are padded
    for bits in (least, *(each for each in BITS if each > least)):
        layouts = dealt_layouts(alike, int(bits * n_weights / 8))
        wider = tuple(sorted((name, layout) for name, layout in layouts.items() if layout != "int4"))
        try:
            made = plan(replace(plain, matrix_layouts=wider), profile, limits)
        except UsageError:
            if bits == least:
                raise
            return
        n_bytes = sum(part.weight_bytes for part in made.parts)
        is_on_gpu = all(part.decode_placement.on_gpu for part in made.parts[1:])
        yield Size(bits, n_bytes, made.prediction.generated_tokens_per_s, is_on_gpu)


def best_size(found: Sequence[Size]) -> tuple[Size, str]:
    """Return the size to choose, and the reason.

    While the GPU holds the whole model, its free memory costs nothing. Otherwise the CPU has to read more.
    """
    if whole := [each for each in found if each.is_on_gpu]:
        return whole[-1], "the most with which the GPU holds the whole model"
    fastest = max(each.tokens_per_s for each in found)
    fast = [each for each in found if each.tokens_per_s >= FAST * fastest]
    return fast[-1], f"the most that cost at most {100 * (1 - FAST):.0f} % of the speed"
