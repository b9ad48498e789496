"""Attention against float64 on the pages' own (rounded) contents: 3e-6 of the largest value seen.

Cases mix sequences, positions and page orders; a row is computed again alone, in other pages and with another table,
and must keep its bits. Places that no row may see hold NaN.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.attention import attention
from hetero_ee_kernels.kv_write import kv_write
from hetero_ee_kernels.pages import (
    FEW_ROWS,
    KINDS,
    PAGE_TOKENS,
    PART_TOKENS,
    Pages,
    attention_workspace,
    new_pages,
)
from tests import attention_case
from tests.attention_case import BUGS, FIRST, TOLERANCE, AttentionCase
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, int32, random

N_LAYERS, LAYER = 2, 1


class Case(AttentionCase):
    def pages(self, seed: int = 0, spare: int = 0) -> Pages:
        """The texts in pages in a random order, with room for `spare` more pages each; NaN wherever nothing is."""
        needed = [-(-len(text) // PAGE_TOKENS) for text in self.texts]
        shape, table_shape = (N_LAYERS, self.n_kv_heads, self.head_dim), (len(self.texts), max(needed) + spare)
        pages = new_pages(shape, self.kind, sum(needed) + 1, table_shape, DEVICE)
        pages.codes.fill_(-128 if self.kind == "int8" else float("nan"))
        if pages.scales is not None:
            pages.scales.fill_(float("nan"))
        free = torch.randperm(sum(needed) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
        pages.table.fill_(free.pop())  # what is not used points to a page of NaN
        for slot, text in enumerate(self.texts):
            for page in range(needed[slot]):
                pages.table[slot, page] = free.pop()
            slots, positions = int32(*[slot] * len(text)), int32(*range(len(text)))
            kv_write_quickly(text, pages, slots, positions, self.width)
        return pages

    def scattered(self, pages: Pages) -> tuple[Pages, Any]:
        """The same pages and more, where the last positions of some rows are in lines of their own, and their paths."""
        shape, more = (N_LAYERS, self.n_kv_heads, self.head_dim), -(-5 * len(self.rows) // PAGE_TOKENS)
        n_old, (n_slots, n_first) = len(pages.codes), pages.table.shape
        tree = new_pages(shape, self.kind, n_old + n_slots * more, (n_slots, n_first + more), DEVICE)
        for new, old in ((tree.codes, pages.codes), (tree.scales, pages.scales)):
            if old is not None:
                new[:n_old] = old
        tree.table[:, :n_first] = pages.table
        tree.table[:, n_first:] = torch.arange(n_slots * more).view(n_slots, more) + n_old
        paths = torch.zeros(len(self.rows), 6, dtype=torch.int32, device=DEVICE)
        for row, (sequence, position) in enumerate(self.rows):
            n = min(row % 6, position + 1)
            lines = [n_first * PAGE_TOKENS + 5 * row + place for place in range(n)]
            paths[row, : n + 1] = int32(position + 1 - n, *reversed(lines))
            for end in range(n):
                at, way = position + 1 - n + end, paths[row : row + 1].clone()
                write = kv_write if row == 3 else reference.kv_write
                text = self.texts[sequence][at : at + 1].clone()
                write(text, tree, int32(sequence), int32(at), LAYER, 0, self.width, paths=way)
        return tree, paths

    def attend(
        self, pages: Pages, rows: Any = None, dtype: Any = torch.float32, workspace: Any = None, paths: Any = None
    ) -> Any:
        chosen = list(range(len(self.rows))) if rows is None else rows
        slots, positions = (int32(*[self.rows[row][part] for row in chosen]) for part in (0, 1))
        out = Guarded((len(chosen), self.group * self.width), dtype)
        queries = self.queries[chosen].contiguous()
        options = {"first": FIRST, "workspace": workspace, "scale": self.scale, "cap": self.cap, "sinks": self.sinks}
        options |= {"paths": paths}
        assert attention(queries, pages, slots, positions, LAYER, self.window, out.tensor, **options) is out.tensor
        return out.check()

    def is_accurate(self, found: Any, pages: Pages, bug: str = "", tolerance: float = TOLERANCE) -> bool:
        return self.fits(found, lambda *place: reference.read(pages, place[0], LAYER, *place[1:]), bug, tolerance)


def kv_write_quickly(text: Any, pages: Pages, slots: Any, positions: Any, width: int) -> None:
    """By the reference: the interpreter would take a second for a text. One row by the kernel, so that they agree."""
    from hetero_ee_kernels.reference import kv_write as write

    write(text, pages, slots, positions, LAYER, 0, width)
    kv_write(text[-1:].clone(), pages, slots[-1:].clone(), positions[-1:].clone(), LAYER, 0, width)


def case(
    seed: int, kind: str, heads: tuple[int, int, int], window: int | None, lengths: list[int], rows: Any = None
) -> Case:
    """heads: n_kv_heads, group, head_dim. rows: the last position of each sequence where None."""
    n_kv_heads, group, head_dim = heads
    texts = [random(seed + i, n, 2 * n_kv_heads * head_dim) for i, n in enumerate(lengths)]
    rows = [(i, n - 1) for i, n in enumerate(lengths)] if rows is None else rows
    queries = random(seed + 99, len(rows), FIRST + n_kv_heads * group * head_dim + 2, scale=3.0)
    return Case(kind, n_kv_heads, group, head_dim, window, texts, rows, queries)


SHAPES = [(1, 1, 8), (2, 3, 20), (1, 8, 64), (3, 2, 12), (1, 5, 16), (2, 4, 80), (1, 1, 128), (2, 1, 10), (1, 3, 512)]
MIXED = [(0, 69), (1, 0), (2, 32), (0, 63), (0, 64)]


@pytest.mark.few(10)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.sample(3)
def test_accurate_for_every_shape(heads: tuple[int, int, int], window: int | None) -> None:
    kind = list(KINDS)[SHAPES.index(heads) % 3]
    mixed = case(1, kind, heads, window, [70, 1, 33], MIXED)
    pages = mixed.pages()
    assert mixed.is_accurate(mixed.attend(pages), pages)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_with_a_scale_and_a_cap(kind: str) -> None:
    mixed = replace(case(3, kind, (2, 3, 20), 7, [70, 1, 33], MIXED), scale=0.3, cap=2.0)
    pages = mixed.pages()
    found = mixed.attend(pages)
    assert mixed.is_accurate(found, pages)
    slots, positions = (int32(*[row[part] for row in MIXED]) for part in (0, 1))
    plain = torch.empty_like(found)
    reference.attention(
        mixed.queries, pages, slots, positions, LAYER, 7, plain, first=FIRST, scale=mixed.scale, cap=mixed.cap
    )
    assert mixed.is_accurate(plain, pages)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("n_rows", [5, FEW_ROWS + 1])
@pytest.mark.parametrize(("kind", "heads"), [("fp32", (2, 3, 20)), ("fp16", (1, 2, 64)), ("int8", (3, 1, 8))])
@pytest.mark.sample(3)
def test_a_path_of_a_tree_has_the_bits_of_a_chain(
    kind: str, heads: tuple[int, int, int], n_rows: int, window: int | None
) -> None:
    """The last positions of each row are in lines of its own, in other pages; some rows have none."""
    rows = (MIXED * 4)[:n_rows]
    mixed = case(5, kind, heads, window, [70, 1, 33], rows)
    pages = mixed.pages()
    whole = mixed.attend(pages)
    tree, paths = mixed.scattered(pages)
    assert_same_bits(mixed.attend(tree, paths=paths), whole)
    plain, expected = torch.empty_like(whole), torch.empty_like(whole)
    slots, positions = (int32(*[row[part] for row in rows]) for part in (0, 1))
    for out, held, ways in ((plain, tree, paths), (expected, pages, None)):
        reference.attention(mixed.queries, held, slots, positions, LAYER, window, out, first=FIRST, paths=ways)
    assert_same_bits(plain, expected)


@pytest.mark.parametrize(("kind", "heads"), [("fp32", (2, 3, 20)), ("fp16", (1, 8, 64)), ("int8", (3, 1, 8))])
def test_sinks_take_part_in_the_softmax(kind: str, heads: tuple[int, int, int]) -> None:
    """In passes whose parts have programs of their own, and in those with more than FEW_ROWS rows."""
    n_heads = heads[0] * heads[1]
    rows = MIXED + [(2, position) for position in range(FEW_ROWS)]
    mixed = replace(case(7, kind, heads, 40, [70, 1, 33], rows), sinks=random(8, n_heads, scale=3.0))
    pages = mixed.pages()
    whole = mixed.attend(pages)
    assert mixed.is_accurate(whole, pages)
    assert not mixed.is_accurate(whole, pages, "sinks")
    for row in range(3):
        assert_same_bits(mixed.attend(pages, [row])[0], whole[row])
    slots, positions = (int32(*[row[part] for row in rows]) for part in (0, 1))
    plain = torch.empty_like(whole)
    reference.attention(mixed.queries, pages, slots, positions, LAYER, 40, plain, first=FIRST, sinks=mixed.sinks)
    assert mixed.is_accurate(plain, pages)


@pytest.mark.parametrize("kind", KINDS)
def test_accurate_for_every_kind_and_fp16_output_is_rounded(kind: str) -> None:
    mixed = case(1, kind, (1, 3, 20), 40, [70, 1, 33], MIXED)
    pages = mixed.pages()
    found = mixed.attend(pages)
    assert mixed.is_accurate(found, pages)
    assert_same_bits(mixed.attend(pages, dtype=torch.float16), found.half())


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [None, 7])
def test_every_length_from_1_to_70(window: int | None) -> None:
    lengths = case(2, "fp16", (1, 2, 8), window, [70], [(0, position) for position in range(70)])
    pages = lengths.pages()
    assert lengths.is_accurate(lengths.attend(pages), pages)


@pytest.mark.few(2)
@pytest.mark.parametrize("window", [None, 100, 300, 1000])
def test_contexts_of_several_parts(window: int | None) -> None:
    lengths = [3 * PART_TOKENS - 5, PART_TOKENS, PART_TOKENS + 1]
    long = case(3, "fp16", (2, 2, 16), window, lengths)
    pages = long.pages()
    assert long.is_accurate(long.attend(pages), pages)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_bits_depend_on_the_row_alone(kind: str) -> None:
    """Neither on m nor on the other rows, the order of pages, the longest context or what the workspace held."""
    rows = [(row % 3, [60, 300, 20][row % 3] - row) for row in range(16)]
    mixed = case(4, kind, (1, 3, 8), 200, [61, 301, 21], rows)
    pages, others = mixed.pages(seed=0), mixed.pages(seed=5, spare=9)
    whole = mixed.attend(pages)
    assert mixed.is_accurate(whole, pages)
    workspace = attention_workspace(others, 16, 3).fill_(float("nan"))
    for m in (1, 2, 5, 16):
        some = list(range(16 - m, 16))
        assert_same_bits(mixed.attend(others, some, workspace=workspace), whole[some])


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_moves_no_block_s_edge(kind: str) -> None:
    """Positions before the window, made to weigh exactly 0, may as well be seen."""
    for position, window in ((149, 30), (149, 64), (140, 1), (63, 10), (299, 40)):
        one = case(5, kind, (1, 1, 24), window, [position + 1])
        one.texts[0][: position + 1 - window, :24] = -1000 * one.queries[0, FIRST : FIRST + 24]
        pages = one.pages()
        assert_same_bits(one.attend(pages), replace(one, window=None).attend(pages))


def test_what_a_row_does_not_see_does_not_matter() -> None:
    one = case(6, "fp32", (2, 2, 8), 70, [150], [(0, 100)])
    pages = one.pages()
    before = one.attend(pages)
    one.texts[0][:31], one.texts[0][101:] = float("nan"), float("inf")
    assert_same_bits(one.attend(one.pages()), before)


def test_nan_in_a_query_or_a_seen_key_spoils_that_row_alone() -> None:
    two = case(7, "fp32", (1, 2, 8), None, [40, 30])
    good = two.attend(two.pages())
    two.queries[0, FIRST] = float("nan")
    found = two.attend(two.pages())
    assert found[0, :8].isnan().all()
    assert_same_bits(found[0, 8:], good[0, 8:])
    assert_same_bits(found[1], good[1])
    two.texts[1][3, 0] = float("nan")
    assert two.attend(two.pages())[1].isnan().all()


@pytest.mark.parametrize("size", [60.0, 0.0])
def test_sharp_and_flat_scores(size: float) -> None:
    one = case(8, "fp32", (1, 2, 16), None, [400])
    one.queries = one.queries.sign() * size
    pages = one.pages()
    assert one.is_accurate(one.attend(pages), pages, tolerance=1e-4)


def test_the_torch_reference_agrees() -> None:
    for kind in KINDS:
        mixed = case(9, kind, (2, 3, 20), 50, [70, 130])
        pages = mixed.pages()
        slots, positions = int32(0, 1), int32(69, 129)
        out = torch.empty(2, 120, device=DEVICE)
        reference.attention(mixed.queries, pages, slots, positions, LAYER, 50, out, first=FIRST)
        assert mixed.is_accurate(out, pages)


def test_wrong_arguments_are_refused() -> None:
    one = case(0, "fp16", (2, 2, 8), None, [9])
    pages, queries, slots, positions = one.pages(), one.queries, int32(0), int32(8)
    out = torch.empty(1, 32, device=DEVICE)
    for bad in (
        lambda: attention(queries, pages, slots, positions, 2, None, out),
        lambda: attention(queries, pages, slots, positions, 0, 0, out),
        lambda: attention(queries, pages, slots, positions, 0, None, out, sinks=torch.zeros(1, device=DEVICE)),
        lambda: attention(queries, pages, slots, positions, 0, None, out, first=6),
        lambda: attention(queries, pages, slots, positions, 0, None, out[:, :24].contiguous()),
        lambda: attention(queries, pages, slots, positions, 0, None, out.double()),
        lambda: attention(queries.double(), pages, slots, positions, 0, None, out),
        lambda: attention(queries, pages, slots.long(), positions, 0, None, out),
        lambda: attention(queries, pages, int32(0, 0), positions, 0, None, out),
        lambda: attention(queries, pages, slots, positions, 0, None, out, workspace=torch.empty(7, device=DEVICE)),
    ):
        with pytest.raises(ValueError):
            bad()


def test_the_tolerance_catches_every_bug() -> None:
    assert (PAGE_TOKENS, PART_TOKENS) == (attention_case.BLOCK_TOKENS, attention_case.PART_TOKENS)
    one = case(10, "fp32", (2, 3, 8), 290, [300])
    pages = one.pages()
    found = one.attend(pages)
    assert one.is_accurate(found, pages)
    assert not [bug for bug in BUGS if one.is_accurate(found, pages, bug)]


@pytest.mark.parametrize("part", [0, 1])
def test_a_neighbour_s_scale_is_caught(part: int) -> None:
    one = case(11, "int8", (1, 2, 8), None, [50])
    pages = one.pages()
    found = one.attend(pages)
    pages.scales[:, :, part] = pages.scales[:, :, part].roll(1, -1)
    assert one.is_accurate(found, one.pages()) and not one.is_accurate(found, pages)


SHARING = [("fp32", (1, 1, 8)), ("fp16", (1, 2, 12)), ("int8", (1, 1, 12)), ("int8", (2, 2, 8))]


@pytest.mark.few(5)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("kind", "heads"), SHARING)
@pytest.mark.sample(1)
def test_rows_that_share_a_program_have_the_bits_of_one_row(
    kind: str, heads: tuple[int, int, int], window: int | None
) -> None:
    """Of one sequence across a part's edge, then of several: next to each other, in turns, in any order."""
    rows = [(0, position) for position in range(PART_TOKENS - 3, PART_TOKENS + 3)]
    rows += [(1, 0), (0, 9), (1, 1), (0, 8), (1, 2), (2, 20), (2, 21), (0, PART_TOKENS), (1, 1), (2, 0)]
    shared = case(14, kind, heads, window, [PART_TOKENS + 3, 3, 22], rows)
    pages = shared.pages()
    alone = torch.cat([shared.attend(pages, [row]) for row in range(len(rows))])
    assert len(rows) == FEW_ROWS and shared.is_accurate(alone, pages)
    for first, end in ((0, 16), (1, 6), (3, 11)):
        assert_same_bits(shared.attend(pages, list(range(first, end))), alone[first:end])


@pytest.mark.parametrize("kind", ["fp16", "int8", "fp32"])
@pytest.mark.sample(1)
def test_what_is_not_finite_spoils_no_row_that_does_not_see_it(kind: str) -> None:
    """A key or value that some of four rows see, which share a program."""
    positions = (20, 35, 50, 63)
    four = case(15, kind, (2, 4, 20), 44, [64], [(0, position) for position in positions])
    pages = four.pages()
    good = four.attend(pages)
    assert four.is_accurate(good, pages)
    for place in (3, 25, 40, 63):
        sees = [position - 44 < place <= position for position in positions]
        for part, feature in ((0, 3), (1, 0), (1, 5), (1, 10), (1, 17)):  # of its key, and of its value in some threads
            spoiled = four.pages()
            at = spoiled.table[0, 0], LAYER, part, 1, place
            if spoiled.scales is None:
                spoiled.codes[(*at, feature)] = float("inf" if part else "nan")
            else:
                spoiled.scales[at] = float("inf")
            found = four.attend(spoiled)
            for row, is_spoiled in enumerate(sees):
                if is_spoiled:
                    assert not found[row].isfinite().all()
                else:
                    assert_same_bits(found[row], good[row])


def test_a_page_beyond_32_bits_of_elements() -> None:
    """4 GiB of which two pages are touched: their first elements are the same but for bits beyond the 32nd."""
    last = 2**32 // (2 * PAGE_TOKENS * 128)
    text, query = random(16, 3, 2 * 128), random(17, 1, 128)
    found = []
    for n_pages in (1, last + 1):
        codes = torch.empty((n_pages, 1, 2, 1, PAGE_TOKENS, 128), dtype=torch.int8, device=DEVICE)
        pages = Pages(codes, torch.ones(codes.shape[:5], device=DEVICE), int32(n_pages - 1)[None])
        codes[0], pages.scales[0] = -128, float("nan")
        kv_write(text, pages, int32(0, 0, 0), int32(0, 1, 2), 0, 0, 128)
        found.append(attention(query, pages, int32(0), int32(2), 0, None, torch.empty(1, 128, device=DEVICE)))
    assert found[0].isfinite().all()
    assert_same_bits(*found)


@pytest.mark.few(3)
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("heads", [(2, 1, 16), (1, 2, 8), (1, 4, 16), (1, 3, 8)])
@pytest.mark.sample(1)
def test_a_prompts_rows_have_the_bits_of_one_row(heads: tuple[int, int, int], window: int | None) -> None:
    """More rows than FEW_ROWS are one launch, without a workspace, that adds up the parts itself."""
    rows = [(0, position) for position in range(290, 310)] + [(1, 0), (1, 1), (0, 5), (1, 2)]
    many = case(12, "fp16", heads, window, [310, 3], rows)
    pages = many.pages()
    together = many.attend(pages, workspace=torch.empty(0, device=DEVICE))
    assert len(rows) > FEW_ROWS and many.is_accurate(together, pages)
    for first in range(len(rows)):
        assert_same_bits(many.attend(pages, [first]), together[[first]])


def test_an_infinite_value_spoils_no_other_sequence() -> None:
    two = case(13, "fp32", (1, 1, 8), None, [40, 30], [(0, 38), (0, 39), (1, 28), (1, 29)])
    good = two.attend(two.pages())
    two.texts[1][3, 8:] = float("inf")
    found = two.attend(two.pages())
    assert_same_bits(found[:2], good[:2])
    assert not found[2:].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [3, FEW_ROWS + 1])
def test_values_may_be_the_last_features_of_keys(kind: str, m: int) -> None:
    """Keys and queries like those of latent attention: their first features are only multiplied."""
    n_heads, head_dim, shared_dim, n_tokens = 5, 22, 18, 70
    pages = new_pages((N_LAYERS, 1, head_dim, 1), kind, 2, (1, 2), DEVICE)
    pages.table[0] = int32(1, 0)
    kv_write(random(0, n_tokens, head_dim), pages, int32(*[0] * n_tokens), int32(*range(n_tokens)), LAYER, 0, 0)
    queries, out = random(1, m, n_heads * head_dim, scale=3.0), torch.empty(m, n_heads * shared_dim, device=DEVICE)
    slots, positions = int32(*[0] * m), int32(*range(n_tokens - m, n_tokens))
    place = pages, slots, positions, LAYER, None
    attention(queries, *place, out, shared_dim=shared_dim)
    expected = reference.attention(queries, *place, torch.empty_like(out), shared_dim=shared_dim)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()) * 2)
    keys, _ = reference.read(pages, 0, LAYER, 0, n_tokens)
    scores = torch.einsum("hd,pd->hp", queries[-1].view(n_heads, head_dim), keys[0]) * head_dim**-0.5
    by_hand = (torch.softmax(scores, -1) @ keys[0, :, -shared_dim:]).flatten()
    torch.testing.assert_close(expected[-1], by_hand, rtol=1e-5, atol=1e-5)
    alone = attention(queries[:1], pages, slots[:1], positions[:1], LAYER, None, out[:1].clone(), shared_dim=shared_dim)
    assert_same_bits(alone, out[:1])
