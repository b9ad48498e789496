"""Runs some tests of tests/gpu/interpreted for each kernel on emulated PTX.

PTX_ARCHITECTURE=86 pytest -n 0 tests/gpu/interpreted runs all of them on PTX.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hetero_ee_kernels.delta_state import DeltaShape
from hetero_ee_kernels.gated_delta import gated_delta, mamba2
from hetero_ee_kernels.masked_linear import masked_linear
from hetero_ee_kernels.short_conv import short_conv
from hetero_ee_kernels.sparse_ffn import sparse_ffn
from tests.gpu.ptx.launcher import ONLY_HERE, Launcher

pytestmark = ONLY_HERE
ARCHITECTURES = (86, 120)
DELTA = DeltaShape(n_key_heads=1, n_value_heads=2, key_dim=6, value_dim=8, n_taps=3, n_logged=7, n_kept=4)
REPLAYS = "a_rollback_replays_what_is_left"
CONV = DeltaShape(0, 0, 0, 0, n_taps=4, n_logged=7, n_kept=4, n_headless=300)
QUICK: list[tuple[Any, ...]] = [  # (file, test, arguments): one case per kernel
    ("quantize", "codes_and_scales", (2, 1056), torch.float32),
    ("norm", "heads_in_place_and_nothing_beside_them", 80),
    ("activate", "bits_depend_on_the_row_alone"),
    ("matmul", "products_equal_float64", "linear", (70, 1100, 3)),
    ("experts", "a_decode_pass", "codebook", True),
    ("route", "bits_are_the_cpus", "all", 2),
    ("route", "scores_that_are_nan_are_chosen_last", "all"),
    ("route", "bits_are_the_cpus", "best two of groups", 2),
    ("embed", "rows_are_the_matrix_s", "codebook", 1056),
    ("rope", "turns_and_touches_nothing_else", 64, 32),
    ("attention", "accurate_for_every_shape", (1, 8, 64), None),
    ("gated_delta", "outputs_are_the_formulas", DELTA, False, gated_delta),
    ("gated_delta", "outputs_are_the_formulas", DELTA, False, mamba2),
    ("short_conv", "outputs_are_the_formula", CONV, short_conv),
    ("draft", "a_draft_vocabulary_has_its_tokens_noise"),
    ("sparse_ffn", "bits_of_any_shape_are_the_definitions", (70, 200), 2, True),
]
MORE: list[tuple[Any, ...]] = [
    ("experts", "a_prompt", 1, 16),
    ("route", "bits_are_the_cpus", "many of all", 18),
    ("route", "bits_are_the_cpus", "many chosen", 2),
    ("route", "bits_are_the_cpus", "sigmoid", 18),
    ("route", "bits_are_the_cpus", "best of groups", 2),
    ("route", "scores_that_are_nan_are_chosen_last", "best two of groups"),
    ("route", "experts_whose_scores_are_minus_infinite_come_before_those_of_other_groups"),
    ("experts", "sums_are_added_from_the_highest_expert_to_the_lowest"),
    ("quantize", "two_terms"),
    ("quantize", "codes_and_scales", (5, 250), torch.float16),
    ("norm", "accurate_and_the_residual_is_added", "rms", 1000),
    ("norm", "accurate_and_the_residual_is_added", "layer", 1000),
    ("attention", "contexts_of_several_parts", 300),
    ("attention", "a_prompts_rows_have_the_bits_of_one_row", (1, 4, 16), None),
    (
        "gated_delta",
        "outputs_are_the_formulas",
        DELTA._replace(n_key_heads=2, n_value_heads=4, key_dim=12, value_dim=20),
        True,
        gated_delta,
    ),
    ("gated_delta", "a_wide_head"),
    ("gated_delta", "bits_depend_neither_on_cuts_nor_on_other_slots", gated_delta),
    ("gated_delta", "a_rollback_replays_what_is_left", gated_delta),
    *(("gated_delta", name, mamba2) for name in ("bits_depend_neither_on_cuts_nor_on_other_slots", REPLAYS)),
    ("short_conv", "bits_depend_neither_on_cuts_nor_on_other_slots", short_conv),
    ("short_conv", "a_rollback_forgets_drafts", short_conv),
    ("draft", "the_token_that_sampling_draws", 1.0),
    ("draft", "the_network_judges_the_four_largest", 5000, 33, ""),
    ("draft", "the_noise_is_finite_and_accurate_at_its_ends"),
    ("sparse_ffn", "thresholds_skip_neurons_of_rows_that_may", sparse_ffn),
    ("sparse_ffn", "sections_of_two_blocks", "alternating"),
    ("sparse_ffn", "the_first_sections_are_added_to_the_rest", 700, True),
    ("masked_linear", "bits_of_any_shape_are_the_definitions", (70, 200), 3),
    ("masked_linear", "tokens_that_may_not_skip_have_all_neurons", masked_linear),
]
for _kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu", "softcap"):
    MORE.append(("activate", "accurate", _kind, True, 513))
for _kind in ("linear", "codebook", "int8", "zeros"):
    MORE += [("matmul", "products_equal_float64", _kind, (70, 1100, m)) for m in (1, 8, 16, 32, 40)]
    MORE.append(("matmul", "two_terms", _kind))
    MORE.append(("matmul", "a_rows_bits_do_not_depend_on_the_others", _kind, (40, 160)))
for _kind in ("linear", "codebook", "int8"):
    MORE += [("sliced_head", "bits_of_the_whole_product", _kind, 1088), ("embed", "learned_positions_are_added", _kind)]
for _kind in ("fp32", "fp16", "int8"):
    MORE.append(("kv_write", "writes_what_the_kind_can_hold_and_nothing_else", _kind, 64))
    MORE.append(("kv_write", "turns_queries_in_place_and_keys_on_their_way", _kind, 20, 5))
    MORE.append(("attention", "scores_with_a_scale_and_a_cap", _kind))
    MORE.append(("attention", "bits_depend_on_the_row_alone", _kind))


def run(case: tuple[Any, ...]) -> None:
    """Call a test of tests/gpu/interpreted."""
    file, name, *arguments = case
    getattr(importlib.import_module(f"tests.gpu.interpreted.test_{file}"), f"test_{name}")(*arguments)


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join(str(getattr(part, "__name__", part)) for part in case)


@pytest.fixture(params=ARCHITECTURES)
def launcher(request: pytest.FixtureRequest, run_folder: Path) -> Iterator[Launcher]:
    """Emulates the test's launches for a compute capability."""
    with Launcher(request.param, run_folder / "ptx").reported(request.node) as launcher:
        yield launcher


@pytest.mark.parametrize("launcher", ARCHITECTURES[:1], indirect=True)
@pytest.mark.sample(99)
@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_every_kernel(case: tuple[Any, ...], launcher: Launcher) -> None:
    run(case)
    assert launcher.launches


@pytest.mark.full
@pytest.mark.parametrize("case", QUICK + MORE, ids=name_of)
def test_every_specialization(case: tuple[Any, ...], launcher: Launcher) -> None:
    run(case)
    assert launcher.launches
