"""The product: against float64, and the rule that a row's bits are its own.

1e-9 on the activations as they were multiplied is the bound that catches defects; the CPU's tests have the same.
"""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hetero_ee_kernels import reference
from hetero_ee_kernels.embed import embed
from hetero_ee_kernels.matmul import matmul
from hetero_ee_kernels.sliced_head import sliced_head
from hetero_ee_kernels.tile_group import MAGIC_BITS, MMA_PTX, mma
from hetero_ee_kernels.tile_matrix import GCN, PLAIN, ZEROS, TileMatrix
from tests.gpu_fragments import run_warp
from tests.gpu_support import DEVICE, IS_INTERPRETED, Guarded, assert_same_bits, random
from tests.gpu_tiles import CODEBOOKS, EXPONENT, KINDS, VOCABULARY_KINDS, activations, nmse, random_matrix

BOUND = 1e-9
SHAPES = [(16, 32, 1), (17, 33, 2), (3, 1054, 3), (33, 64, 9), (16, 2080, 1), (70, 130, 40)]


@pytest.mark.few(11)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_products_equal_float64(kind: str, shape: tuple[int, int, int]) -> None:
    n_rows, n_columns, m = shape
    weight = random_matrix(kind, (n_rows, n_columns))
    x = activations(1, m, n_columns)
    out = Guarded((m, n_rows))
    assert matmul(x, weight, out.tensor) is out.tensor
    assert nmse(out.check(), reference.matmul(x, weight)) <= BOUND


@pytest.mark.sample(0)
def test_any_number_of_rows() -> None:
    weight = random_matrix("linear", (16, 64))
    for m in (0, 1, 2, 8, 9, 16, 17, 33):
        x = random(m, m, 64)
        found = matmul(x, weight)
        assert found.shape == (m, 16) and nmse(found, reference.matmul(x, weight)) <= BOUND


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("linear", (16, 1088)), ("codebook", (40, 160)), ("int8", (40, 160)), ("zeros", (40, 160)), ("int6", (40, 160))],
)
@pytest.mark.sample(1)
def test_a_rows_bits_do_not_depend_on_the_others(kind: str, shape: tuple[int, int]) -> None:
    """Every width that a program may have: of one token, of 8, 16 and 32, and of a prompt."""
    weight = random_matrix(kind, shape)
    x = activations(2, 37, shape[1])
    alone = [matmul(x[row : row + 1].clone(), weight) for row in (0, 4, 36)]
    for chosen in ([36, 4, 0], [*range(9), 36], [*range(19), 36], list(range(37))):
        product = matmul(x[chosen].clone(), weight)
        for row, bits in zip((0, 4, 36), alone, strict=True):
            if row in chosen:
                place = chosen.index(row)
                assert_same_bits(product[place : place + 1], bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(0)
def test_two_terms(kind: str) -> None:
    """Each width of a program: a token's bits are its own, those of sliced logits and of AMD's programs, and close to
    fp32 activations."""
    weight, x = random_matrix(kind, (33, 160), n_terms=2), activations(2, 37, 160)
    whole = matmul(x, weight)
    assert nmse(whole, reference.matmul(x, weight)) <= BOUND
    exact = x.double() @ reference.dequantize(weight).double().T
    most = 2e-8 if kind == "int6" else 1e-8  # whose two scales of a group are drawn apart
    assert nmse(whole, exact[:, :33]) <= most <= nmse(matmul(x, random_matrix(kind, (33, 160))), exact[:, :33])
    for m in (1, 4, 8):
        assert_same_bits(matmul(x[:m].clone(), weight), whole[:m])
    if kind in VOCABULARY_KINDS:
        ids = torch.tensor([19, 0, 7, 32], device=DEVICE)
        assert_same_bits(sliced_head(x[:3].clone(), weight, ids), whole[:3, ids])
    if kind != "codebook":
        weight.isa = GCN
        assert_same_bits(matmul(x[:3].clone(), weight), whole[:3])


def test_a_prompt_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: launches.append(grid)

    monkeypatch.setattr("hetero_ee_kernels.matmul.matmul_kernel", Launched())
    matmul(random(9, 100, 64), random_matrix("linear", (80, 64)))
    assert launches == [(2 * 4,)]  # 64 rows and 32 tokens a program


def test_fp16_activations_are_those_numbers_in_fp32() -> None:
    weight, x = random_matrix("int8", (20, 96)), random(3, 3, 96).half()
    assert_same_bits(matmul(x, weight), matmul(x.float(), weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_the_product_is_the_cpu_kernels(kind: str) -> None:
    """The same int8 codes and integer sums; only the order of the fp32 sums differs."""
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
    from hetero_ee_cpu_ops.matmul import Matmul
    from hetero_ee_cpu_ops.matmul import TileMatrix as CpuMatrix

    weight, x = random_matrix(kind, (33, 250)), activations(4, 3, 250)
    tiles, scales = weight.tiles.cpu().numpy(), weight.scales.cpu().numpy()
    pool = ThreadPool(1)
    try:
        expected = Matmul(pool)(x.cpu().numpy(), CpuMatrix(tiles, scales, EXPONENT, CODEBOOKS[kind]))[:, :33]
    finally:
        pool.close()
    assert nmse(matmul(x, weight).cpu(), torch.from_numpy(np.ascontiguousarray(expected))) <= 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_sums_are_exact(kind: str) -> None:
    """All weights and activations at their ends: the integer sums are the largest there are."""
    weight = random_matrix(kind, (16, 64))
    ends = (0x80, 0x7F) if kind == "int8" else (0x00, 0xFF)
    tiles = weight.tiles.view(torch.uint8)
    tiles[:, 0], tiles[:, 1] = ends
    weight.scales.fill_(1.0)
    x = torch.ones((2, 64), device=DEVICE) * 127
    x[1, 32:] = -127
    assert torch.equal(matmul(x, weight), reference.matmul(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_what_is_not_finite(kind: str) -> None:
    weight, x = random_matrix(kind, (32, 96)), random(5, 5, 96)
    x[0] = 0
    x[1, 32:64] = 0
    x[2, 70], x[3, 7] = float("nan"), float("inf")
    expected = reference.matmul(x, weight)
    found = matmul(x, weight)
    assert not found[0].any() and nmse(found[1], expected[1]) <= BOUND and nmse(found[4], expected[4]) <= BOUND
    assert found[2].isnan().all()
    assert torch.equal(found[3].isnan(), expected[3].isnan()) and torch.equal(found[3].isinf(), expected[3].isinf())
    assert torch.equal(found[3].sign().nan_to_num(), expected[3].sign().nan_to_num())


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15])
def test_very_small_and_very_large_activations(scale: float) -> None:
    weight, x = random_matrix("linear", (16, 64)), random(6, 2, 64) * scale
    expected = reference.matmul(x, weight)
    assert nmse(matmul(x, weight).double() / scale, expected.double() / scale) <= BOUND


def test_wrong_operands_are_refused() -> None:
    weight, x = random_matrix("linear", (16, 64)), random(7, 2, 64)
    for wrong in (x.double(), x[:, :32].clone(), random(7, 2, 128)[:, ::2], x[0]):
        with pytest.raises(ValueError, match="Activations are"):
            matmul(wrong, weight)
    for out in (torch.empty(2, 32), torch.empty(2, 16, dtype=torch.float64), torch.empty(16, 2).T):
        with pytest.raises(ValueError, match=r"^out "):
            matmul(x, weight, out.to(DEVICE))


def test_wrong_matrices_are_refused() -> None:
    good = random_matrix("linear", (20, 64))
    tiles, scales, codebook = good.tiles, good.scales, CODEBOOKS["linear"]
    odd = torch.empty(tiles.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(tiles.shape)
    for arguments in (
        (tiles[:, :, :100], scales, 0, codebook),
        (tiles, scales.float(), 0, codebook),
        (tiles, scales[:, :1], 0, codebook),
        (tiles, scales, 0, None),
        (tiles, torch.cat([scales, scales], 2), 0, CODEBOOKS["codebook"]),
        (tiles.transpose(0, 1), scales.transpose(0, 1), 0, codebook),
        (odd, scales, 0, codebook),
        (tiles, scales, 0, codebook, 33),
        (tiles, scales, 0, codebook, 16),
    ):
        with pytest.raises(ValueError, match=r"(?i)tiles|scales"):
            TileMatrix(*arguments)


@triton.jit
def mma_kernel(words_ptr: tl.tensor, out_ptr: tl.tensor, ISA: tl.constexpr) -> None:  # noqa: N803
    """out (4, 32) = mma of six fragments (6, 32)."""
    lane = tl.arange(0, 32)[None, None, :]
    at = words_ptr + lane
    a = (tl.load(at), tl.load(at + 32), tl.load(at + 64), tl.load(at + 96))
    sums = mma(a, (tl.load(at + 128), tl.load(at + 160)), ISA)
    for place in tl.static_range(4):
        tl.store(out_ptr + 32 * place + lane, sums[place])


def lanes(words: Any, isa: int) -> Any:
    out = torch.zeros((4, 32), dtype=torch.int32, device=DEVICE)
    mma_kernel[(1,)](torch.from_numpy(words.astype(np.int32)).to(DEVICE), out, ISA=isa, num_warps=1)
    return out.cpu().numpy()


def test_the_plain_product_of_fragments_is_the_instructions() -> None:
    """What the interpreter computes in place of the tensor cores, against the PTX manual's fragments; AMD's cards have
    one token in all lanes of a row."""
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (6, 32))
    expected = np.array(run_warp(MMA_PTX.value, 4, [*words, np.full(32, MAGIC_BITS.value)]))
    assert (lanes(words, PLAIN) == expected).all()
    words[4:] = np.tile(words[4:, :4], 8)
    expected = np.array(run_warp(MMA_PTX.value, 4, [*words, np.full(32, MAGIC_BITS.value)]))
    assert (lanes(words, GCN) == expected).all()


def test_whole_zero_points_leave_exact_products() -> None:
    random = torch.Generator().manual_seed(0)
    weight = random_matrix("zeros", (33, 160))
    weight.scales[..., :16] = 1.0
    weight.scales[..., 16:] = torch.randint(-8, 8, (*weight.scales.shape[:2], 16), generator=random).half()
    x = torch.randint(-127, 128, (9, 160), generator=random).float()
    x[:, 5::32] = 127
    product = x.double() @ reference.dequantize(weight).cpu().double().T
    assert torch.equal(matmul(x.to(DEVICE), weight).cpu().double(), product[:, :33])


def test_zero_points_of_0_change_no_bit() -> None:
    plain, x = random_matrix("linear", (33, 160)), activations(3, 9, 160)
    scales = torch.cat([plain.scales, torch.zeros_like(plain.scales)], 2)
    weight = TileMatrix(plain.tiles, scales, EXPONENT, plain.codebook, 33)
    assert weight.kind == ZEROS
    assert_same_bits(matmul(x, weight), matmul(x, plain))


def test_zero_points_of_embeddings_and_heads_are_refused() -> None:
    weight, ids = random_matrix("zeros", (33, 64)), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="zero points"):
        sliced_head(random(1, 1, 64), weight, ids)
    with pytest.raises(ValueError, match="zero points"):
        embed(ids.int(), weight, 64, positions=ids.int())


@pytest.mark.parametrize("kind", ["linear", "zeros", "int8"])  # a codebook is looked up by an instruction
def test_amds_programs_of_one_token_have_the_same_bits(kind: str) -> None:
    weight, x = random_matrix(kind, (20, 96)), activations(8, 3, 96)
    expected = matmul(x, weight)
    weight.isa = GCN
    assert_same_bits(matmul(x, weight), expected)


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU: NVIDIA's instructions against the plain arithmetic")
def test_instructions_and_plain_arithmetic_agree() -> None:
    for kind in KINDS:
        weight, x = random_matrix(kind, (48, 1100)), activations(8, 5, 1100)
        fast = matmul(x, weight)
        weight.isa = PLAIN
        assert_same_bits(matmul(x, weight), fast)
