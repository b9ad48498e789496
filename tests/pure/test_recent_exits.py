"""The memory of recent exits: which exit layers it makes active, and exits that are taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.speculation.exits.recent_exits import RecentExits


def expected_active(chosen: set[int], exits: list[int], n_layers: int) -> tuple[int, ...]:
    near = {exit + offset for exit in exits[-5:] for offset in range(-2, 3)}
    return tuple(exit_layer for exit_layer in range(1, n_layers) if exit_layer in chosen | near)


@given(
    chosen=st.sets(st.integers(1, 11)),
    steps=st.lists(st.one_of(st.integers(1, 12), st.floats(0, 1)), max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_the_last_five_exits_and_undone_ones(chosen: set[int], steps: list[float]) -> None:
    """A whole number is an exit, a fraction goes back to that share of them."""
    recent, exits = RecentExits(chosen, 12), list[int]()
    for step in steps:
        if isinstance(step, int):
            recent.append(step)
            exits.append(step)
        else:
            del exits[int(step * len(exits)) :]
            recent.truncate(len(exits))
        assert len(recent) == len(exits)
        assert recent.active() == expected_active(chosen, exits, 12)


def test_a_new_sequence_knows_only_what_was_chosen() -> None:
    assert RecentExits([3, 9], 12).active() == (3, 9)


def test_exit_layers_beyond_the_model_are_refused() -> None:
    for chosen in ([0], [12]):
        with pytest.raises(ValueError, match="model with 12 layers"):
            RecentExits(chosen, 12)
    recent = RecentExits([], 12)
    for exit_layer in (0, 13, -1):
        with pytest.raises(ValueError, match="model with 12 layers"):
            recent.append(exit_layer)
    assert len(recent) == 0 and recent.active() == ()
