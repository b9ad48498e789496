"""The memory of recent exits: which exit layers it makes active."""

from hypothesis import given, settings
from hypothesis import strategies as st

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
