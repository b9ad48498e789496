"""Computes the logits that drafts are chosen from, on any device: final norm, exit map and head."""

from typing import Any

from hetero_ee.layers.decoder import LogitsSpec
from hetero_ee.layers.ops import LOGITS, Array, Matrix, Norm, Ops
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.weights.weight import Weight


class DraftLogits:
    """The final norm, exit map and head of a DraftEnd, with weights on a device.

    Args:
        norm: the model's final norm; None if it has none, or if the states have passed it.
        head: the model's head; None if `end` has a vocabulary of its own.
    """

    def __init__(self, ops: Ops, end: DraftEnd, norm: Norm | None, head: Matrix | None, logits: LogitsSpec) -> None:
        def prepared(weight: Weight) -> Matrix:
            return ops.matrix("a matrix for drafts", weight, None)

        self._norm, self._logits = norm, logits
        self._head = head if end.vocabulary is None else prepared(end.vocabulary.rows)
        self._map: list[Matrix] = []
        if end.state_map is not None:
            self._map = [prepared(each) for each in (end.state_map.down, end.state_map.up) if each is not None]
            self._map_bias = ops.vector(end.state_map.bias)

    def all(self, ops: Ops, x: Array) -> Array:
        """Return the logits (m, n) of all n tokens after states x (m, hidden)."""
        return self._logits.finish(ops, ops.linear(self._mapped(ops, x), self._head, LOGITS))

    def some(self, ops: Ops, x: Array, token_ids: Any) -> Array:
        """Return the logits (m, k) of the tokens `token_ids` (m, k), for ends without a vocabulary of their own."""
        return self._logits.finish(ops, ops.sliced_head(self._mapped(ops, x), self._head, token_ids))

    def _mapped(self, ops: Ops, x: Array) -> Array:
        """Return the head's input (m, hidden): the states after final norm and exit map."""
        if self._norm is not None:
            x = ops.add_norm(x, None, self._norm)
        if not self._map:
            return x
        inner = x
        for matrix in self._map:
            inner = ops.linear(inner, matrix, LOGITS)
        return ops.add(ops.add(inner, x), self._map_bias)
