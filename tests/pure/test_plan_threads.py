"""The number of CPU threads that a plan chooses."""

from dataclasses import replace

from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.reports.what_if import Request, what_if
from hetero_ee.planning.statistics import Statistics
from hetero_ee_profiles.hardware import MatmulTime
from hetero_ee_profiles.reference import derived_profile
from tests.pure.test_planner import spec_of
from tests.shipped import DATA_SHEETS


def test_asked_threads_stay_in_the_plan_and_foreign_times_are_told() -> None:
    found = plan(spec_of(), derived_profile(DATA_SHEETS[0], "2026-11-21"), Limits(threads=4))
    assert found.threads == 4 and any("the profile has none for 4" in reason for reason in found.reasons)


def test_other_measured_numbers_of_threads_are_offered() -> None:
    """The fastest is planned, since more threads may be slower, and the others keep their own speeds."""
    profile = replace(derived_profile(DATA_SHEETS[0], "2026-11-21"), gpu=None, link=None)
    [times] = profile.cpu
    slower = replace(times, threads=12, matmuls=tuple(doubled(row) for row in times.matmuls))
    profile = replace(profile, cpu=(times, slower))
    spec, limits = spec_of(8), Limits(context_tokens=512)
    made = plan(spec, profile, limits)
    found = what_if(Request(spec, profile, limits, Statistics(), made))
    assert made.threads == 6 and "-t 6" not in found and found["-t 12"].threads == 12
    assert made.prediction.generated_tokens_per_s > 1.5 * found["-t 12"].prediction.generated_tokens_per_s


def doubled(row: MatmulTime) -> MatmulTime:
    value = 2 * row.time.value
    return replace(row, time=replace(row.time, value=value, p20=value, p80=value))


def test_without_a_thread_count_the_fastest_measured_one_is_planned() -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    [times] = profile.cpu
    slow = replace(times.overheads[0].layer, value=1.0, p80=1.0)
    slower = replace(times, threads=99, overheads=tuple(replace(each, layer=slow) for each in times.overheads))
    both = replace(profile, cpu=(times, slower))
    assert plan(spec_of(), both).threads == times.threads
    assert plan(spec_of(), both, Limits(threads=99)).threads == 99
