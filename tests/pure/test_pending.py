"""advance: which tokens move when, and in which batches, on a model whose answers are scripted."""

import pytest

from hetero_ee.speculation.pending import PendingToken, advance, batch_of
from tests.scripted_model import N_LAYERS, ScriptedModel, successor

# Of each token its sequence, position and depth.
Token = tuple[int, int, int]
# Of each pass its layers, and the sequences and positions of its batch.
Pass = tuple[int, int, list[tuple[int, int]]]

# Position 0 of both sequences has passed every layer.
CASES: dict[str, tuple[list[Token], int, list[Pass]]] = {
    "one token": ([(0, 1, 0)], 4, [(0, 4, [(0, 1)])]),
    "from where it waits": ([(0, 1, 2)], 4, [(2, 4, [(0, 1)])]),
    "those that wait together move together": (
        [(0, 1, 0), (0, 2, 0), (1, 1, 0)],
        3,
        [(0, 3, [(0, 1), (0, 2), (1, 1)])],
    ),
    "the shallowest catch up first": (
        [(0, 1, 3), (0, 2, 1), (0, 3, 0), (1, 1, 1)],
        6,
        [
            (0, 1, [(0, 3)]),
            (1, 3, [(0, 2), (0, 3), (1, 1)]),
            (3, 6, [(0, 1), (0, 2), (0, 3), (1, 1)]),
        ],
    ),
    "those that are there stay": ([(0, 1, 4), (1, 1, 0)], 3, [(0, 3, [(1, 1)])]),
    "those that are deeper are not met": (
        [(0, 1, 5), (0, 2, 2), (1, 1, 0)],
        4,
        [(0, 2, [(1, 1)]), (2, 4, [(0, 2), (1, 1)])],
    ),
    "none moves": ([(0, 1, 3), (1, 1, 3)], 3, []),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_move_in_as_few_passes_as_can_be(name: str) -> None:
    tokens, to_layer, expected = CASES[name]
    model = ScriptedModel(successor, successor)
    waiting = [PendingToken(7 * sequence + position, sequence, position) for sequence, position, _ in tokens]
    for sequence in (0, 1):
        assert model.cache.open_new() == sequence
        advance(model, [PendingToken(5, sequence, 0)], N_LAYERS)  # type: ignore[arg-type]
    for token, (_, _, depth) in zip(waiting, tokens, strict=True):
        advance(model, [token], depth)  # type: ignore[arg-type]
    model.passes.clear()

    hidden = advance(model, waiting, to_layer)  # type: ignore[arg-type]

    assert [
        (one.layers.start, one.layers.stop, list(zip(one.batch.sequences, one.batch.positions, strict=True)))
        for one in model.passes
    ] == expected
    depths = [max(depth, to_layer) for _, _, depth in tokens]
    assert [token.depth for token in waiting] == depths
    states = [[token.token_id, token.position, depth] for token, depth in zip(waiting, depths, strict=True)]
    assert hidden is not None and hidden.tolist() == states  # in the order of the tokens
    assert [token.hidden.tolist() for token in waiting if token.hidden is not None] == states


def test_before_the_embedding_there_is_no_state() -> None:
    model = ScriptedModel(successor, successor)
    waiting = [PendingToken(4, 0, 0), PendingToken(5, 1, 0)]
    assert advance(model, waiting, 0) is None and model.passes == []  # type: ignore[arg-type]
    batch = batch_of(waiting)
    assert (batch.token_ids, batch.sequences, batch.positions) == ((4, 5), (0, 1), (0, 0))
