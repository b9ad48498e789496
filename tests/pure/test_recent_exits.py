"""The memory of recent exits: which exit layers it makes active."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.options.engine import SCHEDULES
from hetero_ee.speculation.exits.recent_exits import RecentExits


def expected_active(chosen: set[int], exits: list[int], n_layers: int) -> tuple[int, ...]:
    near = {exit + offset for exit in exits[-5:] for offset in range(-2, 3)}
    return tuple(exit_layer for exit_layer in range(1, n_layers) if exit_layer in chosen | near)


@given(chosen=st.sets(st.integers(1, 11)), exits=st.lists(st.integers(1, 12), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_last_five_exits(chosen: set[int], exits: list[int]) -> None:
    recent = RecentExits(chosen, 12)
    for n_exits, depth in enumerate(exits, start=1):
        recent.append(depth)
        assert recent.active() == expected_active(chosen, exits[:n_exits], 12)


def test_a_new_sequence_knows_only_what_was_chosen() -> None:
    assert RecentExits([3, 9], 12).active() == (3, 9)


def test_each_group_of_layers_can_be_left_out() -> None:
    found = {each: RecentExits([3, 9], 12, each) for each in SCHEDULES}
    every = tuple(range(1, 12))
    new = {"none": every, "offline": (3, 9), "online": every, "both": (3, 9)}
    assert {each: recent.active() for each, recent in found.items()} == new
    for recent in found.values():
        recent.append(6)
    near = {"none": every, "offline": (3, 9), "online": (4, 5, 6, 7, 8), "both": (3, 4, 5, 6, 7, 8, 9)}
    assert {each: recent.active() for each, recent in found.items()} == near
