"""Which implementation is chosen, when it is reported, and that nothing is imported before it is."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.ops.registry import IMPLEMENTATIONS, Registry, is_installed


def only(*packages: str) -> Callable[[str], bool]:
    """A machine that has these packages and no others."""
    return lambda package: package in packages


@pytest.mark.parametrize(
    ("packages", "kind", "chosen"),
    [
        (("triton", "bitsandbytes", "torch"), "cuda", "triton"),
        (("bitsandbytes", "torch"), "cuda", "bitsandbytes"),
        (("torch",), "cuda", "torch"),
        (("triton", "bitsandbytes", "torch"), "rocm", "triton"),
        (("bitsandbytes", "torch"), "rocm", "torch"),
    ],
)
def test_the_first_that_is_there_multiplies(packages: tuple[str, ...], kind: str, chosen: str) -> None:
    registry = Registry(only(*packages))
    assert registry.choose("matmul_int4", kind).name == chosen
    assert registry.explain("matmul_int4", kind).implementation.name == chosen


def test_eight_bit_weights_never_go_to_bitsandbytes() -> None:
    assert Registry(only("bitsandbytes", "torch")).choose("matmul_int8", "cuda").name == "torch"


def test_doing_without_the_preferred_one_is_told_once() -> None:
    told: list[str] = []
    registry = Registry(only("bitsandbytes", "torch"), told.append)
    for _ in range(3):
        registry.choose("matmul_int4", "cuda")
    assert len(told) == 1
    for word in ("matmul_int4", "bitsandbytes", "triton can't be imported", "pip install triton"):
        assert word in told[0]
    registry.choose("rms_norm", "cuda")
    assert len(told) == 2 and "rms_norm" in told[1]


def test_the_preferred_one_is_told_by_nobody() -> None:
    told: list[str] = []
    registry = Registry(only("triton", "torch"), told.append)
    registry.choose("matmul_int4", "cuda")
    assert told == []
    assert registry.explain("matmul_int4", "cuda").reason.endswith("the fastest there is.")


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(
        UsageError, match="no operation is called 'convolve' on 'cuda'; there are activate, add_experts, attention"
    ):
        Registry().choose("convolve", "cuda")
    with pytest.raises(UsageError, match="on 'tpu'; there are none"):
        Registry().choose("matmul_int4", "tpu")
    with pytest.raises(UsageError, match=r"nothing on this machine computes activate on cuda.* or `pip install torch`"):
        Registry(only()).choose("activate", "cuda")


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_every_operation_has_a_torch_reference_that_loads(kind: str) -> None:
    registry, operations = Registry(only("torch")), {one.operation for one in IMPLEMENTATIONS}
    assert len(operations) >= 10
    for operation in operations:
        assert callable(registry.choose(operation, kind).load())


def test_everything_registered_loads() -> None:
    for implementation in IMPLEMENTATIONS:
        if implementation.name != "bitsandbytes":  # that import takes seconds; test_bitsandbytes_matmul.py has it
            assert callable(implementation.load())
        assert callable(implementation.load_prepare())


def test_choosing_imports_nothing() -> None:
    code = (
        "import sys; from hetero_ee.ops.registry import IMPLEMENTATIONS, Registry; r = Registry(); "
        "[r.explain(i.operation, k) for k in ('cuda', 'rocm') for i in IMPLEMENTATIONS]; "
        "print([m for m in ('torch', 'triton', 'bitsandbytes', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import hetero_ee.runtime.gpu.segment
from hetero_ee.ops.registry import IMPLEMENTATIONS, Registry
from hetero_ee.weights.quantizers import quantize
from hetero_ee_kernels import reference

registry, device = Registry(lambda package: package == "torch"), torch.device("cpu")
chosen = Registry().choose("matmul_int4", "cuda")
chosen.load(), chosen.load_prepare()
for one in IMPLEMENTATIONS:
    if one.name == "torch":
        one.load(), one.load_prepare()
x, ids = torch.randn(3, 70), torch.tensor([39, 0, 7])
for operation, quantizer in (("matmul_int4", "rtn"), ("matmul_int4", "codebook"), ("matmul_int8", "int8")):
    weight = quantize(torch.randn(40, 70), quantizer)
    dense = weight.dequantize()
    multiply, cut = (registry.choose(name, "cuda") for name in (operation, "sliced_head"))
    matrix = multiply.load_prepare()(weight, device)
    product = x @ dense.T
    torch.testing.assert_close(multiply.load()(x, matrix), product, rtol=0, atol=0.3)
    torch.testing.assert_close(cut.load()(x, matrix, ids), product[:, ids], rtol=0, atol=0.3)
    torch.testing.assert_close(reference.dequantize(matrix)[ids, :70], dense[ids])
print(chosen.name, [name for name in sys.modules if name.startswith("triton.")])
"""


@pytest.mark.sample(0)
def test_without_triton_bitsandbytes_is_chosen_and_the_references_compute() -> None:
    """As on Windows, where Triton can't be imported; its int8 activations leave products within 0.3 of the exact."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = "bitsandbytes" if is_installed("bitsandbytes") else "torch"
    assert done.stdout.strip() == f"{expected} []"
