"""Pages beyond 2^31 elements: what lies there is written and attended to as in a small pool."""

import pytest
import torch

from hetero_ee_kernels.attention import attention
from hetero_ee_kernels.kv_write import kv_write
from hetero_ee_kernels.pages import KINDS, PAGE_TOKENS, Pages
from tests.gpu_support import DEVICE, assert_same_bits, int32, random

N_LAYERS, N_KV_HEADS, HEAD_DIM = 2, 2, 16
PAGE_SHAPE = (N_LAYERS, 2, N_KV_HEADS, PAGE_TOKENS, HEAD_DIM)
FAR = 2**31 // (N_LAYERS * 2 * N_KV_HEADS * PAGE_TOKENS * HEAD_DIM) + 1  # pages that hold more than 2^31 elements
N_TOKENS = PAGE_TOKENS + 6


def pool(kind: str, first: int) -> Pages:
    """Whose one sequence has the two pages from `first` on. Reserved: what is not written takes no memory."""
    codes = torch.empty(first + 2, *PAGE_SHAPE, dtype=KINDS[kind], device=DEVICE)
    scales = torch.empty(first + 2, *PAGE_SHAPE[:-1], device=DEVICE) if kind == "int8" else None
    return Pages(codes, scales, int32(first, first + 1)[None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_a_page_beyond_two_to_the_31(kind: str) -> None:
    width, found = N_KV_HEADS * HEAD_DIM, []
    x = random(0, N_TOKENS, 3 * width)
    for first in (0, FAR):
        pages, slots, positions = pool(kind, first), int32(*[0] * N_TOKENS), int32(*range(N_TOKENS))
        kv_write(x.clone(), pages, slots, positions, 1, width, 2 * width)
        last = slice(N_TOKENS - 3, N_TOKENS)
        out = torch.empty(3, width, device=DEVICE)
        found.append(
            attention(x[last].contiguous(), pages, slots[last].clone(), positions[last].clone(), 1, None, out).clone()
        )
    assert found[0].isfinite().all()
    assert_same_bits(*found)
