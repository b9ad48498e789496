"""What is written into the pages: exactly what the kind can hold, where it belongs, and nowhere else."""

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.kv_write import kv_write
from hetero_ee_kernels.pages import KINDS, PAGE_TOKENS, Pages, new_pages
from hetero_ee_kernels.rope_table import rope_table
from tests.gpu_support import DEVICE, assert_same_bits, guarded_copy, int32, random

N_LAYERS, LAYER, N_KV_HEADS = 3, 1, 2
SLOTS, POSITIONS = (0, 1, 0, 1, 2), (2, 127, 3, 64, 0)  # two sequences of two pages, one of one


def poisoned(kind: str, head_dim: int, n_kv_heads: int = N_KV_HEADS) -> Pages:
    """Pages scattered over the pool, everything in them NaN (int8: -128 with NaN scales)."""
    pages = new_pages((N_LAYERS, n_kv_heads, head_dim), kind, 6, (3, 2), DEVICE)
    pages.codes.fill_(-128 if kind == "int8" else float("nan"))
    if pages.scales is not None:
        pages.scales.fill_(float("nan"))
    pages.table.copy_(torch.tensor([[4, 0], [1, 5], [2, 0]]))
    return pages


def place(pages: Pages, row: int) -> tuple[int, int]:
    """Page and line of a row."""
    slot, position = SLOTS[row], POSITIONS[row]
    return int(pages.table[slot, position // PAGE_TOKENS]), position % PAGE_TOKENS


def same_pages(first: Pages, second: Pages) -> None:
    assert_same_bits(first.codes, second.codes)
    if first.scales is not None:
        assert_same_bits(first.scales, second.scales)


@pytest.mark.few(7)
@pytest.mark.parametrize("head_dim", [8, 10, 20, 64, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_writes_what_the_kind_can_hold_and_nothing_else(kind: str, head_dim: int) -> None:
    width = N_KV_HEADS * head_dim
    x = random(head_dim, 5, 4 + 2 * width + 1) * torch.tensor([1e-5, 1.0, 1e3, 0.0, 7.0], device=DEVICE)[:, None]
    pages, held = poisoned(kind, head_dim), guarded_copy(x)
    kv_write(held.tensor, pages, int32(*SLOTS), int32(*POSITIONS), LAYER, 4, 4 + width)
    assert_same_bits(held.check(), x)
    untouched = poisoned(kind, head_dim)
    for row in range(5):
        page, line = place(pages, row)
        for part, first in enumerate((4, 4 + width)):
            given = x[row, first : first + width].view(N_KV_HEADS, head_dim)
            codes = pages.codes[page, LAYER, part, :, line]
            if pages.scales is None:
                assert_same_bits(codes, given.to(codes.dtype))
            else:
                scale = pages.scales[page, LAYER, part, :, line]
                assert_same_bits(scale, given.abs().amax(-1) / 127)
                assert ((codes * scale[:, None] - given).abs() <= 0.50001 * scale[:, None]).all()
                pages.scales[page, LAYER, part, :, line] = float("nan")
            pages.codes[page, LAYER, part, :, line] = untouched.codes[page, LAYER, part, :, line]
    same_pages(pages, untouched)


@pytest.mark.few(4)
@pytest.mark.parametrize(("head_dim", "n_pairs"), [(8, 4), (20, 5), (10, 5), (12, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_queries_in_place_and_keys_on_their_way(kind: str, head_dim: int, n_pairs: int) -> None:
    n_heads, width = 4, N_KV_HEADS * head_dim
    first = n_heads * head_dim
    x = random(n_pairs, 5, first + 2 * width)
    turns = rope_table([3.0**-pair for pair in range(n_pairs)], 1.1, 128, DEVICE)
    pages, held = poisoned(kind, head_dim), guarded_copy(x)
    kv_write(held.tensor, pages, int32(*SLOTS), int32(*POSITIONS), LAYER, first, first + width, rotary_table=turns)
    after = held.check()
    heads = reference.rotated(x[:, : first + width].reshape(5, -1, head_dim), int32(*POSITIONS), turns).flatten(1)
    assert (after[:, :first] - heads[:, :first]).abs().max() <= 1e-6
    assert_same_bits(after[:, first:], x[:, first:])
    plain = poisoned(kind, head_dim)
    ready = torch.cat([x[:, :first], heads[:, first:], x[:, first + width :]], 1)
    kv_write(ready, plain, int32(*SLOTS), int32(*POSITIONS), LAYER, first, first + width)
    gap = (pages.codes.float() - plain.codes.float()).nan_to_num().abs().max()
    assert gap <= {"fp32": 1e-6, "fp16": 4e-3, "int8": 1}[kind]  # one step where the last bit of the turn differs
    assert_same_bits(pages.codes[:, :, 1], plain.codes[:, :, 1])


@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_torch_reference_agrees(kind: str, with_rope: bool) -> None:
    x, turns = random(3, 5, 64), rope_table([1.0, 0.3, 0.1], 1.0, 128, DEVICE) if with_rope else None
    found, wanted, other = poisoned(kind, 8), poisoned(kind, 8), x.clone()
    kv_write(x, found, int32(*SLOTS), int32(*POSITIONS), 2, 32, 48, rotary_table=turns)
    reference.kv_write(other, wanted, int32(*SLOTS), int32(*POSITIONS), 2, 32, 48, rotary_table=turns)
    assert (x - other).abs().max() <= 1e-6
    gap = (found.codes.float() - wanted.codes.float()).nan_to_num().abs().max()
    assert gap <= {"fp32": 1e-6, "fp16": 4e-3, "int8": 1}[kind]
    assert torch.equal(found.codes.float().isnan(), wanted.codes.float().isnan())


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_the_row_alone(kind: str) -> None:
    x, turns = random(4, 5, 64), rope_table([1.0, 0.3], 1.0, 128, DEVICE)
    together, one_by_one = poisoned(kind, 8), poisoned(kind, 8)
    kv_write(x.clone(), together, int32(*SLOTS), int32(*POSITIONS), LAYER, 32, 48, rotary_table=turns)
    for row in reversed(range(5)):
        slot, position = int32(SLOTS[row]), int32(POSITIONS[row])
        kv_write(x[row : row + 1].clone(), one_by_one, slot, position, LAYER, 32, 48, rotary_table=turns)
    same_pages(together, one_by_one)


def test_fp16_rounds_to_nearest_even_within_its_range() -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()[::37]
    between = (halves[:-1] + halves[1:]) / 2
    beyond = torch.tensor([65519.0, 65520.0, 1e30, torch.inf])
    x = torch.cat([halves, between, torch.nextafter(between, torch.tensor(torch.inf)), beyond])
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 256)]).to(DEVICE)[None]
    width = x.shape[1] // 2
    pages = poisoned("fp16", width, n_kv_heads=1)
    kv_write(x, pages, int32(0), int32(5), LAYER, 0, width)
    assert_same_bits(pages.codes[4, LAYER, :, 0, 5].flatten(), x.clamp(-65504, 65504).half().flatten())
    wanted = poisoned("fp16", width, n_kv_heads=1)
    reference.kv_write(x, wanted, int32(0), int32(5), LAYER, 0, width)
    same_pages(pages, wanted)


def test_int8_rounds_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3.49]], device=DEVICE).repeat(1, 2)
    pages = poisoned("int8", 8, n_kv_heads=1)
    kv_write(x, pages, int32(0), int32(5), LAYER, 0, 8)
    assert pages.codes[4, LAYER, 0, 0, 5].tolist() == [127, 0, 2, 2, 0, -2, -126, 3]


def test_wrong_arguments_are_refused() -> None:
    x, pages, slots, positions = random(0, 2, 32), poisoned("fp32", 8), int32(0, 1), int32(0, 1)
    turns = rope_table([1.0], 1.0, 128, DEVICE)
    for bad in (
        lambda: kv_write(x, pages, slots, positions, 3, 0, 16),
        lambda: kv_write(x, pages, slots, positions, -1, 0, 16),
        lambda: kv_write(x, pages, slots, positions, 0, 0, 17),
        lambda: kv_write(x, pages, slots, positions, 0, -1, 16),
        lambda: kv_write(x, pages, slots[:1], positions, 0, 0, 16),
        lambda: kv_write(x, pages, slots, positions.long(), 0, 0, 16),
        lambda: kv_write(x.half(), pages, slots, positions, 0, 0, 16),
        lambda: kv_write(x, pages, slots, positions, 0, 4, 16, rotary_table=turns),
        lambda: kv_write(x, pages, slots, positions, 0, 0, 16, rotary_table=turns.double()),
        lambda: Pages(pages.codes, pages.codes, pages.table),
        lambda: Pages(pages.codes.half(), None, pages.table.long()),
        lambda: Pages(pages.codes.to(torch.int8), None, pages.table),
        lambda: Pages(pages.codes[:, :, :1], None, pages.table),
        lambda: Pages(pages.codes.transpose(0, 1), None, pages.table),
    ):
        with pytest.raises(ValueError):
            bad()
    assert pages.codes.isnan().all()
