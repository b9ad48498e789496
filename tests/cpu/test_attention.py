"""Attention and cache writes against float64: 3e-6 of the largest value seen, on the cache's own (rounded) contents.

Every random case mixes sequences, positions and capacities; rows are recomputed alone, in a cache of another capacity
whose unused places hold NaN, and over threads, and must keep their bits.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numba.core.registry import cpu_target

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.ops.torch_ops import BatchedTorchOps, TorchOps
from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_cpu_ops.attention.kv_table import DTYPES, SequenceCache, kv_table
from hetero_ee_cpu_ops.attention.kv_write import KvWrite
from hetero_ee_cpu_ops.simd.bytes import target_has
from tests.attention_case import BUGS, FIRST, TOLERANCE, AttentionCase
from tests.cpu_support import Guarded, assert_close, assert_same_bits, teams

N_LAYERS, LAYER = 3, 1


def empty_cache(kind, n_kv_heads, capacity, head_dim):
    """Room full of NaN (int8: of -128 with NaN scales), so that a place read by mistake shows."""
    shape = (N_LAYERS, n_kv_heads, capacity, head_dim)
    fill = {"fp32": np.nan, "fp16": 0x7E00, "int8": -128}[kind]
    parts = [np.full(shape, fill, DTYPES[kind]) for _ in range(2)]
    scales = [np.full(shape[:3], np.nan, np.float32) for _ in range(2)] if kind == "int8" else [None, None]
    return SequenceCache(*parts, *scales)


def stored(cache, part, layer=LAYER):
    """What lies in the cache, as float64 (n_kv_heads, capacity, head_dim)."""
    raw, scales = getattr(cache, part)[layer], getattr(cache, part[:-1] + "_scales")
    if scales is not None:
        return raw * scales[layer].astype(np.float64)[:, :, None]
    return (raw.view(np.float16) if raw.dtype == np.uint16 else raw).astype(np.float64)


class Case(AttentionCase):
    def caches(self, spare):
        made = []
        writer = KvWrite(N_LAYERS, self.n_kv_heads, self.head_dim, self.kind)
        for text in self.texts:
            cache = empty_cache(self.kind, self.n_kv_heads, len(text) + spare, self.head_dim)
            table = kv_table([cache] * len(text), range(len(text)), self.shape, self.kind)
            writer.write(text, table, LAYER, 0, self.n_kv_heads * self.head_dim)
            made.append(cache)
        return made

    @property
    def shape(self):
        return N_LAYERS, self.n_kv_heads, self.head_dim

    def scattered(self, rng):
        """Caches in which some rows have their last positions in slots of their own, and those rows' paths."""
        caches, paths, writer = self.caches(spare=400), [], KvWrite(N_LAYERS, *self.shape[1:], self.kind)
        free = {
            number: list(rng.permutation(np.arange(len(text), len(text) + 400)))
            for number, text in enumerate(self.texts)
        }
        for sequence, position in self.rows:
            n = int(rng.integers(0, min(position + 1, 20) + 1))
            path = tuple(int(free[sequence].pop()) for _ in range(n))
            paths.append(path)
            if n:
                positions, text = range(position + 1 - n, position + 1), self.texts[sequence]
                ways = [path[: end + 1] for end in range(n)]
                table = kv_table([caches[sequence]] * n, positions, self.shape, self.kind, ways)
                writer.write(text[position + 1 - n : position + 1], table, LAYER, 0, self.width)
        return caches, paths

    def attend(self, caches, rows=None, pool=None, window="own", paths=()):
        chosen = range(len(self.rows)) if rows is None else rows
        places = [self.rows[row] for row in chosen]
        ways = [paths[row] for row in chosen] if paths else ()
        table = kv_table([caches[s] for s, _ in places], [p for _, p in places], self.shape, self.kind, ways)
        n_heads = self.group * self.n_kv_heads
        attention = Attention(
            N_LAYERS, n_heads, self.n_kv_heads, self.head_dim, self.kind, pool, scale=self.scale, cap=self.cap
        )
        out = Guarded((len(places), n_heads * self.head_dim), np.float32)
        queries = self.queries[list(chosen)]
        options = {} if self.sinks is None else {"sinks": self.sinks}
        window = self.window if window == "own" else window
        attention.attend(queries, table, LAYER, window, out.array, first=FIRST, **options)
        out.check()
        return out.array

    def is_accurate(self, found, caches, bug="", tolerance=TOLERANCE):
        def read(sequence, first, end):
            return tuple(stored(caches[sequence], part)[:, first:end] for part in ("keys", "values"))

        return self.fits(found, read, bug, tolerance)


def random_case(seed, kind=None):
    rng = np.random.default_rng(seed)
    kind = kind or list(DTYPES)[seed % 3]
    n_kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 8]))
    head_dim = int(rng.choice([8, 12, 20, 64, 80, 128]))
    lengths = rng.integers(1, 200, int(rng.integers(1, 5)))
    texts = [rng.normal(size=(n, 2 * n_kv_heads * head_dim)).astype(np.float32) for n in lengths]
    rows = []
    for _ in range(int(rng.integers(1, 18))):
        sequence = int(rng.integers(len(texts)))
        rows.append((sequence, int(rng.integers(lengths[sequence]))))
    queries = rng.normal(size=(len(rows), FIRST + n_kv_heads * group * head_dim + 5)).astype(np.float32) * 3
    window = [None, 1, 7, 64, 500][int(rng.integers(5))]
    return Case(kind, n_kv_heads, group, head_dim, window, texts, rows, queries)


def test_accurate_in_random_cases():
    for seed in range(150):
        case = random_case(seed)
        caches = case.caches(spare=seed % 7)
        assert case.is_accurate(case.attend(caches), caches), seed


def test_bits_depend_on_the_row_alone():
    with teams() as all_teams:
        for seed in range(150):
            case = random_case(1000 + seed)
            caches, other = case.caches(spare=0), case.caches(spare=1 + seed % 300)
            whole = case.attend(caches)
            assert_same_bits(case.attend(other), whole)
            assert_same_bits(case.attend(other, pool=all_teams[seed % 3]), whole)
            for row in range(len(case.rows)):
                assert_same_bits(case.attend(other, [row])[0], whole[row])


@pytest.mark.parametrize("kind", DTYPES)
def test_a_path_of_a_tree_has_the_bits_of_a_chain(kind):
    with teams() as all_teams:
        for seed in range(40):
            case, rng = random_case(4000 + seed, kind), np.random.default_rng(seed)
            whole, (caches, paths) = case.attend(case.caches(spare=0)), case.scattered(rng)
            assert_same_bits(case.attend(caches, pool=all_teams[seed % 3], paths=paths), whole)
            for row in range(len(case.rows)):
                assert_same_bits(case.attend(caches, [row], paths=paths)[0], whole[row])


@pytest.mark.parametrize("kind", DTYPES)
def test_scores_with_a_scale_and_a_cap(kind):
    with teams() as all_teams:
        for seed in range(40):
            case = replace(random_case(2000 + seed, kind), scale=0.3, cap=[50.0, 2.0][seed % 2])
            caches, other = case.caches(spare=0), case.caches(spare=1 + seed % 300)
            whole = case.attend(caches)
            assert case.is_accurate(whole, caches), seed
            assert_same_bits(case.attend(other, pool=all_teams[seed % 3]), whole)
            for row in range(len(case.rows)):
                assert_same_bits(case.attend(other, [row])[0], whole[row])


@pytest.mark.parametrize("kind", DTYPES)
def test_sinks_take_part_in_the_softmax(kind):
    """Sinks far below, among and far above the scores; the row that sees one position has the largest share."""
    with teams() as all_teams:
        for seed in range(40):
            case, rng = random_case(3000 + seed, kind), np.random.default_rng(seed)
            case.rows[0] = (0, 0)
            n_heads = case.n_kv_heads * case.group
            case = replace(case, sinks=(rng.normal(size=n_heads) * 4 + [-3, 0, 9][seed % 3]).astype(np.float32))
            caches, other = case.caches(spare=0), case.caches(spare=1 + seed % 300)
            whole = case.attend(caches)
            assert case.is_accurate(whole, caches), seed
            assert not case.is_accurate(whole, caches, "sinks"), seed
            assert_same_bits(case.attend(other, pool=all_teams[seed % 3]), whole)
            for row in range(len(case.rows)):
                assert_same_bits(case.attend(other, [row])[0], whole[row])
            gone = replace(case, sinks=np.full(n_heads, -np.inf, np.float32))
            assert_same_bits(gone.attend(caches), replace(case, sinks=None).attend(caches))


@pytest.mark.parametrize("kind", DTYPES)
def test_rows_that_share_a_pass_keep_their_bits(kind):
    """Consecutive rows of one sequence, as many as a prompt has: over edges of tiles, parts, blocks and windows."""
    rng = np.random.default_rng(list(DTYPES).index(kind))
    with teams() as all_teams:
        for m, n, n_kv_heads, group, head_dim in (
            (2, 70, 2, 1, 128), (5, 130, 1, 1, 64), (3, 64, 1, 8, 64), (67, 200, 1, 1, 20), (130, 130, 2, 1, 16),
            (40, 90, 1, 3, 80), (2, 33, 1, 70, 8), (9, 65, 1, 2, 256),
            (42, 132, 1, 1, 192), (64, 157, 1, 4, 160), (10, 200, 1, 1, 816),
        ):  # fmt: skip
            texts = [rng.normal(size=(n, 2 * n_kv_heads * head_dim)).astype(np.float32) for _ in range(2)]
            rows = [(0, n - m + row) for row in range(m)] + [(1, n - 1), (0, 0)]
            queries = rng.normal(size=(m + 2, 3 + n_kv_heads * group * head_dim)).astype(np.float32) * 3
            for window in (None, 1, 5, 63, 64, 65, 100):
                case = Case(kind, n_kv_heads, group, head_dim, window, texts, rows, queries)
                caches = case.caches(spare=0)
                whole = case.attend(caches, pool=all_teams[m % 3])
                assert case.is_accurate(whole, caches)
                for row in {0, 1, m // 2, m - 1, m, m + 1}:
                    assert_same_bits(case.attend(caches, [row])[0], whole[row])
                assert_same_bits(case.attend(caches, range(1, m)), whole[1:m])


def test_a_neighbour_s_infinity_stays_with_it():
    """What a later row of the same tile wrote and an earlier one does not see, and what is before a window."""
    rng = np.random.default_rng(5)
    texts = [rng.normal(size=(80, 2 * 16)).astype(np.float32)]
    queries = rng.normal(size=(8, 3 + 16)).astype(np.float32)
    for window in (None, 4):
        case = Case("fp32", 1, 1, 16, window, texts, [(0, 72 + row) for row in range(8)], queries)
        caches = case.caches(spare=0)
        before = case.attend(caches)
        for part in (caches[0].keys, caches[0].values):
            part[:, :, 79] = np.inf
            part[:, :, 70] = np.nan if window else part[:, :, 70]
        assert_same_bits(case.attend(caches)[2:7], before[2:7])


@pytest.mark.parametrize("kind", DTYPES)
def test_threads_change_nothing(kind):
    """Enough work to be shared."""
    rng = np.random.default_rng(1)
    texts = [rng.normal(size=(300 + 40 * i, 4 * 64)).astype(np.float32) for i in range(3)]
    rows = [(i % 3, 250 + 3 * i) for i in range(17)]
    case = Case(kind, 2, 4, 64, None, texts, rows, rng.normal(size=(17, 3 + 512)).astype(np.float32))
    caches = case.caches(spare=4)
    whole = case.attend(caches)
    with teams() as all_teams:
        for pool in all_teams:
            for window in (None, 200):
                assert_same_bits(case.attend(caches, pool=pool, window=window), case.attend(caches, window=window))
            assert_same_bits(case.attend(caches, [5], pool=pool)[0], whole[5])


def test_a_window_longer_than_the_text_changes_nothing():
    for seed in range(30):
        case = replace(random_case(seed), window=None)
        caches = case.caches(spare=2)
        assert_same_bits(case.attend(caches, window=200), case.attend(caches))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("group", "head_dim", "value_dim"), [(20, 576, 512), (3, 20, 13), (1, 64, 48)])
def test_values_that_are_a_part_of_what_is_stored(kind, group, head_dim, value_dim):
    """As for latent attention, whose key ends with its value: the bits are the last features' of whole values."""
    rng, n = np.random.default_rng(2), 150
    text = rng.normal(size=(n, 2 * head_dim)).astype(np.float32)
    rows = [(0, position) for position in (*range(60, 70), 149, 3)]
    queries = rng.normal(size=(len(rows), FIRST + group * head_dim)).astype(np.float32)
    case = Case(kind, 1, group, head_dim, None, [text], rows, queries)
    caches = case.caches(spare=2)
    table = kv_table([caches[0]] * len(rows), [position for _, position in rows], case.shape, kind)
    whole = case.attend(caches).reshape(len(rows), group, head_dim)
    attention = Attention(N_LAYERS, group, 1, head_dim, kind, value_dim=value_dim)
    out = Guarded((len(rows), group * value_dim), np.float32)
    attention.attend(queries, table, LAYER, None, out.array, first=FIRST)
    out.check()
    assert_same_bits(out.array.reshape(len(rows), group, value_dim), whole[:, :, -value_dim:])
    alone = [attention.attend(queries[[row]], table[[row]], LAYER, None, first=FIRST)[0] for row in range(len(rows))]
    assert_same_bits(np.stack(alone), out.array)
    assert case.is_accurate(case.attend(caches), caches)


def test_what_a_row_does_not_see_does_not_matter():
    """Later positions and those before the window may hold anything, NaN included."""
    for seed in range(40):
        case = random_case(seed, "fp32")
        sequence, position = case.rows[0]
        caches = case.caches(spare=2)
        before = case.attend(caches, [0])
        first = max(0, position + 1 - case.window) if case.window else 0
        for part in (caches[sequence].keys, caches[sequence].values):
            part[:, :, :first] = np.nan
            part[:, :, position + 1 :] = np.inf
        assert_same_bits(case.attend(caches, [0]), before)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_window_moves_no_block_s_edge(kind):
    """Positions before the window, made to weigh exactly 0, may as well be seen: the blocks are the same."""
    rng = np.random.default_rng(4)
    for position, window in ((149, 30), (149, 64), (149, 101), (140, 1), (63, 10)):
        text = rng.normal(size=(150, 2 * 24)).astype(np.float32)
        query = rng.normal(size=(1, 3 + 24)).astype(np.float32)
        text[: position + 1 - window, :24] = -1000 * query[0, 3:]  # a score far below the others'
        case = Case(kind, 1, 1, 24, window, [text], [(0, position)], query)
        caches = case.caches(spare=0)
        assert_same_bits(case.attend(caches), case.attend(caches, window=None))


def test_matches_the_torch_reference():
    rng = np.random.default_rng(0)
    for n_heads, n_kv_heads, head_dim, window, has_sinks in (
        (8, 2, 64, None, True),
        (6, 6, 20, 7, True),
        (9, 3, 128, None, False),
        (8, 1, 12, 1, False),
    ):
        n = 90
        k, v = rng.normal(size=(2, n, n_kv_heads, head_dim)).astype(np.float32)
        queries = rng.normal(size=(n, n_heads * head_dim)).astype(np.float32)
        cache, rows = CpuKvCache(1, n_kv_heads, head_dim, 100, kind="fp32"), Batch.of_sequence(0, 0, [0] * n)
        cache.open(0)
        cache.admit(rows)
        cache.write(0, rows, torch.from_numpy(k), torch.from_numpy(v))
        shaped = torch.from_numpy(queries).view(n, n_heads, head_dim)
        sinks = rng.normal(size=n_heads * has_sinks).astype(np.float32)
        given = torch.from_numpy(sinks) if has_sinks else None
        expected = TorchOps().attention(shaped, cache, 0, rows, window, sinks=given).reshape(n, -1)
        batched = BatchedTorchOps().attention(shaped, cache, 0, rows, window, sinks=given).reshape(n, -1)
        assert_close(batched.numpy(), expected.double().numpy(), 3e-6)
        held = cache._sequences[0]
        table = kv_table(
            [SequenceCache(*(part.numpy() for part in held.parts))] * n, range(n), (1, n_kv_heads, head_dim), "fp32"
        )
        found = Attention(1, n_heads, n_kv_heads, head_dim, "fp32").attend(queries, table, 0, window, sinks=sinks)
        assert_close(found, expected.double().numpy(), 3e-6)


def test_sharp_and_flat_scores():
    """Scores of 200 and more, and all alike, over many blocks."""
    for seed, size in ((0, 60.0), (1, 0.0)):
        case = replace(random_case(seed, "fp32"), window=None)
        case.queries = np.full_like(case.queries, 1) * np.float32(size) * np.sign(case.queries)
        caches = case.caches(spare=0)
        assert case.is_accurate(case.attend(caches), caches, tolerance=1e-4)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 12, 20, 64, 128])
def test_writes_what_the_kind_can_hold(kind, head_dim):
    rng = np.random.default_rng(head_dim)
    for n_kv_heads in (1, 3):
        width = n_kv_heads * head_dim
        x = (rng.normal(size=(5, 4 + 2 * width)) * 10.0 ** rng.integers(-6, 4, (5, 1))).astype(np.float32)
        x[3] = 0
        caches = [empty_cache(kind, n_kv_heads, 9, head_dim) for _ in range(2)]
        untouched = empty_cache(kind, n_kv_heads, 9, head_dim)
        places = [(0, 2), (1, 8), (0, 3), (1, 0), (0, 0)]
        shape = (N_LAYERS, n_kv_heads, head_dim)
        table = kv_table([caches[s] for s, _ in places], [p for _, p in places], shape, kind)
        KvWrite(N_LAYERS, n_kv_heads, head_dim, kind).write(x, table, LAYER, 4, 4 + width)
        for row, (sequence, position) in enumerate(places):
            for part, first in (("keys", 4), ("values", 4 + width)):
                given = x[row, first : first + width].reshape(n_kv_heads, head_dim)
                raw = getattr(caches[sequence], part)
                got = raw[LAYER, :, position]
                if kind == "int8":
                    scales = getattr(caches[sequence], part[:-1] + "_scales")
                    peak = np.abs(given).max(1)
                    assert_same_bits(scales[LAYER, :, position].copy(), peak / np.float32(127))
                    scale = scales[LAYER, :, position].astype(np.float64)[:, None]
                    assert (np.abs(got * scale - given) <= 0.50001 * scale).all()
                    scales[LAYER, :, position] = np.nan
                else:
                    expected = given if kind == "fp32" else given.astype(np.float16).view(np.uint16)
                    assert_same_bits(got.copy(), expected.copy())
                raw[LAYER, :, position] = getattr(untouched, part)[LAYER, :, position]
        for cache in caches:  # everything else is as it was
            for name in ("keys", "values", "key_scales", "value_scales"):
                if getattr(cache, name) is not None:
                    assert_same_bits(getattr(cache, name), getattr(untouched, name))


def test_fp16_rounds_to_nearest_even_within_its_range():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([halves, between, np.nextafter(between, np.float32(np.inf)), [65519.0, 65520.0, 1e30, np.inf]])
    x = np.resize(np.concatenate([x, -x]), (1, 2 * -(-x.size // 8) * 8)).astype(np.float32)
    half = x.shape[1] // 2
    cache = SequenceCache(*np.zeros((2, 1, 1, 1, half), np.uint16))
    KvWrite(1, 1, half, "fp16").write(x, kv_table([cache], [0], (1, 1, half), "fp16"), 0, 0, half)
    expected = x.clip(-65504, 65504).astype(np.float16).view(np.uint16)[0]
    assert_same_bits(np.concatenate([cache.keys.ravel(), cache.values.ravel()]), expected)


def test_wrong_arguments_are_refused():
    cache, shape = empty_cache("fp32", 2, 10, 8), (N_LAYERS, 2, 8)
    table = kv_table([cache], [4], shape, "fp32")
    attention, writer, q = (
        Attention(N_LAYERS, 4, 2, 8, "fp32"),
        KvWrite(N_LAYERS, 2, 8, "fp32"),
        np.zeros((1, 32), np.float32),
    )
    for bad in (
        lambda: Attention(1, 5, 2, 8, "fp32"),
        lambda: Attention(1, 4, 2, 8, "bf16"),
        lambda: Attention(1, 129, 1, 8, "fp32"),
        lambda: Attention(1, 1, 1, 1025, "fp32"),
        lambda: Attention(1, 1, 1, 8, "fp32", value_dim=9),
        lambda: KvWrite(1, 2, 8, "bf16"),
        lambda: attention.attend(q, table, 3, None),
        lambda: attention.attend(q, table, 0, 0),
        lambda: attention.attend(q, table, 0, None, first=1),
        lambda: attention.attend(q, table, 0, None, np.zeros((1, 16), np.float32)),
        lambda: attention.attend(q.astype(np.float64), table, 0, None),
        lambda: attention.attend(q, table, 0, None, sinks=np.zeros(3, np.float32)),
        lambda: attention.attend(np.zeros((2, 32), np.float32), table, 0, None),
        lambda: writer.write(q, table, 3, 0, 16),
        lambda: writer.write(q, table, 0, 0, 17),
        lambda: writer.write(q, table[:, :5].copy(), 0, 0, 16),
        lambda: kv_table([cache], [10], shape, "fp32"),
        lambda: kv_table([cache], [-1], shape, "fp32"),
        lambda: kv_table([cache], [0, 1], shape, "fp32"),
        lambda: kv_table([cache], [0], shape, "fp16"),
        lambda: kv_table([cache], [0], (N_LAYERS, 1, 8), "fp32"),
        lambda: kv_table([SequenceCache(cache.keys, cache.values[:, :, :9])], [0], shape, "fp32"),
        lambda: kv_table([SequenceCache(cache.keys, cache.values[:, :, ::-1])], [0], shape, "fp32"),
        lambda: kv_table([replace(empty_cache("int8", 2, 10, 8), key_scales=None)], [0], shape, "int8"),
    ):
        with pytest.raises(ValueError):
            bad()
    assert np.isnan(cache.keys).all()


def test_the_tolerance_catches_every_bug():
    rng = np.random.default_rng(3)
    text = rng.normal(size=(400, 2 * 2 * 20)).astype(np.float32)
    queries = rng.normal(size=(2, FIRST + 120)).astype(np.float32)
    case = Case("fp32", 2, 3, 20, 300, [text], [(0, 399), (0, 90)], queries)
    caches = case.caches(spare=1)
    found = case.attend(caches)
    assert case.is_accurate(found, caches)
    assert not [bug for bug in BUGS if case.is_accurate(found, caches, bug)]


@pytest.mark.parametrize("part", ["key_scales", "value_scales"])
def test_a_neighbour_s_scale_is_caught(part):
    case = replace(random_case(2, "int8"), window=None)
    caches = case.caches(spare=0)
    found = case.attend(caches)
    for cache in caches:
        getattr(cache, part)[:] = np.roll(getattr(cache, part), 1, 2)
    assert not case.is_accurate(found, caches)


@pytest.mark.skipif(not target_has(cpu_target.target_context, "avx512f"), reason="all tiles are the same function")
def test_tiles_are_compiled_when_an_item_needs_them():
    attention, shape = Attention(N_LAYERS, 2, 2, 16, "fp16"), (N_LAYERS, 2, 16)
    cache = SequenceCache(*(np.zeros((N_LAYERS, 2, 12, 16), np.uint16) for _ in range(2)))
    for n_rows, known in ((3, (False, False)), (2, (True, False)), (12, (True, False)), (7, (True, True))):
        table = kv_table([cache] * n_rows, range(n_rows), shape, "fp16")
        attention.attend(np.ones((n_rows, 32), np.float32), table, LAYER, None)
        assert tuple(map(bool, attention._functions[1:])) == known, n_rows
