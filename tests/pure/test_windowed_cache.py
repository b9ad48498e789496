"""KV caches of layers with a sliding window: what a token may see is kept, through passes, rollbacks and snapshots."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.layers import state
from hetero_ee.layers.state import LOG_TOKENS, kept_tokens
from hetero_ee_kernels.reference import kv_write
from tests.kv_cache_machine import HEAD_DIM, KINDS, LAYERS, N_KV_HEADS, SHAPE, all_marks, marks, rounded
from tests.kv_contents import read_back

WINDOW, MAX_TOKENS, MAX_PASS = 40, 3000, 100


def on_cpu(kind: str) -> CpuKvCache:
    return CpuKvCache(*SHAPE, MAX_TOKENS, LAYERS, kind=kind, window=WINDOW)


def on_gpu(kind: str) -> GpuKvCache:
    pool_tokens = 2 * kept_tokens(MAX_TOKENS, WINDOW)
    return GpuKvCache(
        SHAPE, MAX_TOKENS, torch.device("cpu"), pool_tokens=pool_tokens, kind=kind, layers=LAYERS, window=WINDOW
    )


class Text:
    """One sequence of a cache, and when each position of each layer was written."""

    def __init__(self, cache: Any, sequence: int) -> None:
        self.cache, self.sequence, self.time = cache, sequence, 0
        self.stamps: list[list[int]] = [[] for _ in LAYERS]
        self.snapshots: dict[int, tuple[list[list[int]], Any]] = {}
        cache.open(sequence)

    def read(self, n_tokens: int, n_layers: int) -> None:
        """Let tokens pass the first layers together, and then, one by one, the others."""
        first = len(self.stamps[0])
        batch = Batch.of_sequence(self.sequence, first, [0] * min(n_tokens, MAX_TOKENS - first))
        if not len(batch.token_ids):
            return
        self._pass(batch, LAYERS[:n_layers])
        for row, token_id in enumerate(batch.token_ids):
            self._pass(Batch.of_sequence(self.sequence, first + row, [token_id]), LAYERS[n_layers:])

    def _pass(self, batch: Batch, layers: tuple[int, ...]) -> None:
        self.time += 1
        if layers:
            self.cache.admit(batch, range(layers[0], layers[-1] + 1))
        for layer in layers:
            keys = all_marks(layer, batch, self.time)
            write(self.cache, layer, batch, keys, -3 * keys)
            self.stamps[LAYERS.index(layer)] += [self.time] * len(batch)

    def cut(self, length: int) -> None:
        length = min(length, len(self.stamps[0]))
        found = self.cache.truncate(self.sequence, length)
        n_tokens = len(self.stamps[0])
        assert found in (0, length) and (found == length or n_tokens - length > LOG_TOKENS)
        self.stamps = [held[:found] for held in self.stamps]
        self.snapshots = {at: kept for at, kept in self.snapshots.items() if at <= found}

    def keep(self) -> None:
        self.snapshots[len(self.stamps[0])] = [[*held] for held in self.stamps], self.cache.snapshot(self.sequence)

    def restore(self, number: int) -> None:
        if self.snapshots:
            length = sorted(self.snapshots)[number % len(self.snapshots)]
            self.stamps = [[*held] for held in self.snapshots[length][0]]
            self.cache.restore(self.sequence, length, self.snapshots[length][1])
            self.snapshots = {at: kept for at, kept in self.snapshots.items() if at <= length}

    def check(self, kind: str) -> None:
        """What the next token sees is what was written last, also by the view that CPU kernels have."""
        if isinstance(self.cache, CpuKvCache):
            assert self.cache.view(self.sequence, begin_of) == self.cache._sequences[self.sequence].first
        for layer, stamps in zip(LAYERS, self.stamps, strict=True):
            assert self.cache.length_at(self.sequence, layer) == len(stamps)
            first = max(0, len(stamps) + 1 - WINDOW)
            written = marks(layer, self.sequence, np.arange(first, len(stamps)), stamps[first:])
            found = read_back(self.cache, layer, self.sequence, first, len(stamps))
            for each, expected in zip(found, (written, -3 * written), strict=True):
                assert np.array_equal(each.numpy(), rounded(kind, expected).swapaxes(0, 1))


def begin_of(first: int, *_: Any) -> int:
    return first


def write(cache: Any, layer: int, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(cache, CpuKvCache):
        return cache.write(layer, batch, keys, values)
    slots, positions = (torch.tensor(part, dtype=torch.int32) for part in (cache.slots(batch), batch.positions))
    x = torch.cat([keys.flatten(1), values.flatten(1)], 1)
    kv_write(x, cache.pages, slots, positions, cache.index(layer), 0, x.shape[1] // 2)


steps = st.one_of(
    st.tuples(st.just("read"), st.integers(1, MAX_PASS), st.sampled_from([1, len(LAYERS), len(LAYERS)])),
    st.tuples(st.just("back"), st.integers(0, LOG_TOKENS)),
    st.tuples(st.just("cut"), st.integers(0, 400)),
    st.tuples(st.just("keep")),
    st.tuples(st.just("restore"), st.integers(0, 9)),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [on_cpu, on_gpu])
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), steps), max_size=40))
def test_what_tokens_see_is_kept(
    make: Callable[[str], Any], kind: str, walk: list[tuple[int, tuple[Any, ...]]]
) -> None:
    cache = make(kind)
    texts = [Text(cache, 0), Text(cache, 1)]
    for number, (name, *arguments) in walk:
        text = texts[number]
        match name:
            case "read":
                text.read(*arguments)
            case "back":
                text.cut(len(text.stamps[0]) - min(arguments[0], len(text.stamps[0])))
            case "cut":
                text.cut(*arguments)
            case "keep":
                text.keep()
            case "restore":
                text.restore(*arguments)
        cache.check()
        for each in texts:
            each.check(kind)


@pytest.mark.parametrize("make", [on_cpu, on_gpu])
def test_memory_is_that_of_the_window(make: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_PASS_TOKENS", MAX_PASS)
    token_bytes = 2 * len(LAYERS) * N_KV_HEADS * HEAD_DIM * 4
    most = kept_tokens(MAX_TOKENS, WINDOW)
    assert most < 300
    cache = make("fp32")
    for sequence in range(2):
        text = Text(cache, sequence)
        while len(text.stamps[0]) < MAX_TOKENS:
            text.read(MAX_PASS if len(text.stamps[0]) % 3 else 1, len(LAYERS))
            text.check("fp32")
    assert cache.n_bytes <= 2 * most * token_bytes + 16 * 4 * MAX_TOKENS // 64 + 64
    with pytest.raises((ValueError, UsageError)):
        cache.stored(LAYERS[0], 0, 0, 10)


@pytest.mark.parametrize("make", [on_cpu, on_gpu])
def test_a_sequence_whose_beginning_was_dropped_can_begin_again(make: Callable[[str], Any]) -> None:
    cache = make("fp32")
    text = Text(cache, 0)
    for _ in range(6):
        text.read(MAX_PASS, len(LAYERS))
        text.check("fp32")
    assert cache._sequences[0].first
    text.cut(0)
    text.read(MAX_PASS, len(LAYERS))
    text.check("fp32")
    cache.check()


def test_a_sequence_can_always_forget_a_verification() -> None:
    cache = on_cpu("fp32")
    text = Text(cache, 0)
    for _ in range(60):
        text.read(37, len(LAYERS))
        n_tokens = len(text.stamps[0])
        assert cache.restorable(0, n_tokens - LOG_TOKENS) == n_tokens - LOG_TOKENS
    assert cache.restorable(0, 100) == 0 and cache.is_bounded


@pytest.mark.parametrize("make", [on_cpu, on_gpu])
def test_a_restoration_that_ctrl_c_ends_leaves_nothing(
    make: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make("fp32")
    text = Text(cache, 0)
    text.read(MAX_PASS, len(LAYERS))
    text.read(MAX_PASS, len(LAYERS))
    kept = cache.snapshot(0)
    for _ in range(8):
        text.read(MAX_PASS, len(LAYERS))
    with monkeypatch.context() as patch:
        patch.setattr(type(cache), "store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.restore(0, 2 * MAX_PASS, kept)
    assert cache.lengths(0) == [0] * len(LAYERS)
    text.stamps = [[] for _ in LAYERS]
    text.read(MAX_PASS, len(LAYERS))
    text.check("fp32")
    cache.check()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_move_that_ctrl_c_ends_leaves_nothing() -> None:
    cache = on_cpu("fp32")
    text = Text(cache, 0)
    for _ in range(6):
        text.read(MAX_PASS, len(LAYERS))
    held = cache._sequences[0]

    class Broken:
        shape = held.parts[0].shape

        def numpy(self) -> Any:
            raise KeyboardInterrupt

    held.parts = (Broken(), *held.parts[1:])
    with pytest.raises(KeyboardInterrupt):
        cache._move(0, held.first + 64, 600)
    assert held.lengths == [0] * len(LAYERS)


def test_old_pages_serve_other_sequences() -> None:
    """More sequences than one pool holds enlarge it, up to what a cache without a window would have."""
    most = 1000
    cache = GpuKvCache(
        SHAPE,
        most,
        torch.device("cpu"),
        pool_tokens=kept_tokens(most, WINDOW),
        kind="int8",
        layers=LAYERS,
        window=WINDOW,
    )
    texts = [Text(cache, number) for number in range(3)]
    for _ in range(10):
        for text in texts:
            text.read(50, len(LAYERS))
    assert cache.version == 0
    texts[0].read(450, len(LAYERS))
    assert cache.version > 0 and len(cache.pages.codes) <= -(-most // 64)
    for text in texts:
        text.check("int8")
    cache.check()
    with pytest.raises(UsageError, match="don't fit"):
        texts[1].read(450, len(LAYERS))
    cache.check()
