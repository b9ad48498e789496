"""Texts whose tokens exit where chance has it: run by an executor, and computed slowly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.pending import PendingToken, advance
from tests.executor_support import MAX_TOKENS, Model

VOCABULARY = 131  # of tests/families.py


@dataclass(frozen=True)
class Exiting:
    """A text: its tokens, and after how many layers each exits."""

    token_ids: list[int]
    depths: list[int]


def exiting_texts(n_layers: int, n_tokens: int = 20, n_texts: int = 3) -> st.SearchStrategy[list[Exiting]]:
    token = st.tuples(st.integers(0, VOCABULARY - 1), st.integers(1, n_layers))
    text = st.lists(token, min_size=1, max_size=n_tokens)
    made = text.map(lambda tokens: Exiting([one for one, _ in tokens], [depth for _, depth in tokens]))
    return st.lists(made, min_size=1, max_size=n_texts)


def run_exiting(executor: Executor, texts: dict[int, Exiting]) -> dict[int, list[Tensor]]:
    """The texts, by sequence, in lockstep; every layer is one where a token may exit. The states each token exits with.

    Tokens that wait go along with later ones of their text.
    """
    n_layers = executor.spec.n_layers
    waiting: dict[int, list[PendingToken]] = {sequence: [] for sequence in texts}
    states: dict[int, list[Tensor]] = {sequence: [] for sequence in texts}
    for position in range(max(len(text.token_ids) for text in texts.values())):
        going = {
            sequence: PendingToken(text.token_ids[position], sequence, position)
            for sequence, text in texts.items()
            if position < len(text.token_ids)
        }
        for layer in range(1, n_layers + 1):
            advance(executor, [each for one, last in going.items() for each in (*waiting[one], last)], layer)
            exits = [last for one, last in going.items() if texts[one].depths[position] == layer]
            for token in exits:
                assert token.hidden is not None and token.depth == layer
                states[token.sequence].append(token.hidden.as_subclass(Tensor).clone())
                del going[token.sequence]
                waiting[token.sequence].append(token)
            for sequence, tokens in waiting.items():
                waiting[sequence] = [token for token in tokens if token.depth < n_layers]
            if not going:
                break
    return states


def stored(executor: Executor, sequence: int) -> list[tuple[Tensor, ...]]:
    """Of each layer what it keeps, as it is stored, as far as it holds lines."""
    found = []
    for layer in range(executor.spec.n_layers):
        cache: Any = executor.cache.part(layer)
        found.append(cache.stored(layer, sequence, 0, cache.length_at(sequence, layer)))
    return found


def assert_same_lines(found: Sequence[tuple[Tensor, ...]], expected: Sequence[tuple[Tensor, ...]]) -> None:
    """The same bits, in as many lines as were found."""
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b[:, : a.shape[1]])


@dataclass
class SlowText:
    """One text of a model, token by token, in plain torch.

    kept: of each layer, keys and values (n_kv_heads, head_dim) line by line; states: that its tokens exited with.
    """

    model: Model
    kept: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks, self.ops = decoder_blocks(self.model[0]), TorchOps()
        self.kept = [([], []) for _ in range(self.model[0].n_layers)]

    def add(self, token_id: int, depth: int) -> None:
        spec, position = self.model[0], len(self.states)
        x = self._rows(self.blocks[0], "tokens", token_id)
        if spec.learned_position_offset is not None:
            x = x + self._vector(self.blocks[0], "positions")[position + spec.learned_position_offset]
        x = self._through(x, 0, depth, position)
        self.states.append(x)
        self._through(x, depth, spec.n_layers, position)  # it goes on at once, which nobody sees

    def _through(self, x: Tensor, first: int, end: int, position: int) -> Tensor:
        for layer in range(first, end):
            query = self._keep(layer, x, position)
            x = x + self._product(self.blocks[1 + 2 * layer], "output", self._attended(layer, query))
            x = x + self._fed_forward(self.blocks[2 + 2 * layer], x)
        return x

    def _keep(self, layer: int, x: Tensor, position: int) -> Tensor:
        """The token's query (n_heads, head_dim), its key and value kept."""
        spec, block = self.model[0], self.blocks[1 + 2 * layer]
        qkv = self._product(block, "qkv", self._normed(block, x))
        query, key, value = (
            part.view(-1, spec.head_dim) for part in qkv.split([spec.query_size, spec.kv_size, spec.kv_size])
        )
        if spec.qk_norm:
            query, key = (
                self.ops.norm(part, "rms", self._vector(block, f"{name}_norm"), None, spec.norm_eps)
                for name, part in (("query", query), ("key", key))
            )
        if spec.rope is not None:
            place: Any = (position,), spec.rope, MAX_TOKENS
            query, key = (self.ops.rope(part[None], *place)[0] for part in (query, key))
        self.kept[layer][0].append(key)
        self.kept[layer][1].append(value)
        return query

    def _attended(self, layer: int, query: Tensor) -> Tensor:
        """Over the lines that the layer keeps, the last ones of them in a window."""
        spec = self.model[0]
        keys, values = (
            torch.stack(lines[-(spec.sliding_windows[layer] or len(lines)) :]) for lines in self.kept[layer]
        )
        heads = []
        for head, one in enumerate(query):
            shared = head * spec.n_kv_heads // spec.n_heads
            weights = torch.softmax(keys[:, shared] @ one / math.sqrt(spec.head_dim), 0)
            heads.append(weights @ values[:, shared])
        return torch.cat(heads)

    def _fed_forward(self, block: Any, x: Tensor) -> Tensor:
        inner = self._product(block, "gate_up" if self.model[0].gated else "up", self._normed(block, x))
        return self._product(block, "down", self.ops.activate(inner[None], self.model[0].layer(0).ffn.activation)[0])

    def _normed(self, block: Any, x: Tensor) -> Tensor:
        spec = self.model[0]
        scale, bias = (self._vector(block, name) for name in ("norm", "norm_bias"))
        return self.ops.norm(x, spec.norm, scale, bias, spec.norm_eps) if block.has_norm else x

    def _product(self, block: Any, short: str, x: Tensor) -> Tensor:
        name = block.tensors[short].name
        bias = self.model[1].vectors.get(f"{name}_bias")
        product = self.model[1].matrices[name].dequantize() @ x
        return product if bias is None else product + bias

    def _rows(self, block: Any, short: str, row: int) -> Tensor:
        return self.model[1].matrices[block.tensors[short].name].rows(torch.tensor([row]))[0]

    def _vector(self, block: Any, short: str) -> Any:
        tensor = block.tensors.get(short)
        return None if tensor is None else self.model[1].vectors[tensor.name]


def end_sequence(executor: Executor, sequence: int) -> None:
    """Cut the cache to the tokens that have passed every layer, as an early-exit mode does at a sequence's end."""
    executor.cache.cut(sequence, executor.cache.length(sequence))
