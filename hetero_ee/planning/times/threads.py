"""Chooses the number of CPU threads from a profile that measured several."""

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.lanes import pass_time
from hetero_ee.planning.times.prompts import Placements, prompt_s
from hetero_ee_profiles.hardware import HardwareProfile

REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS = 512, 128  # sizes of a typical request, whose time the planner minimizes


def fastest_threads(spec: ModelSpec, profile: HardwareProfile) -> int:
    """Return the measured thread count with which the CPU alone serves a typical request fastest.

    A provisional profile can't decide that: it gives the number of physical cores if that was measured. Of equally
    fast counts, the smallest is returned.
    """
    counts = [times.threads for times in profile.cpu]
    if len(counts) == 1 or (profile.doubts and profile.machine.n_cores in counts):
        return counts[0] if len(counts) == 1 else profile.machine.n_cores
    parts = model_parts(spec, KV_TYPE)
    places = (Placement.CPU,) * len(parts)
    n_prompt = min(REQUEST_PROMPT_TOKENS, spec.max_context_tokens)

    def request_s(n_threads: int) -> float:
        costs = Costs(spec, profile, n_threads)
        text_s = REQUEST_TEXT_TOKENS * pass_time(costs, parts, places, 1, n_prompt).seconds
        return text_s + prompt_s(costs, parts, Placements(places, places), n_prompt, n_prompt)

    return min(sorted(counts), key=request_s)
