"""Compiles every GPU kernel for a class of cards without having one, and reads what the compiler made of it."""

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero_ee_profiles.gpu.cards import CardClass

VECTOR_LOADS = re.compile(r"ld\.global\S*\.(?:v4\.\w32|v8\.\w16|v2\.\w64)|(?:global|buffer)_load_b128")  # 16 bytes


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel on one class of cards. stack_bytes: more than 0 where registers were spilled."""

    name: str
    card: CardClass
    n_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    n_vector_loads: int

    @property
    def occupancy(self) -> float:
        return self.card.occupancy(self.registers, self.shared_bytes, self.n_warps)


def compilations() -> Iterator[Any]:
    """The records of every kernel file, in alphabetical order of the files."""
    import hetero_ee_kernels

    for module in pkgutil.iter_modules(hetero_ee_kernels.__path__, "hetero_ee_kernels."):
        found = getattr(importlib.import_module(module.name), "compilations", None)
        yield from found() if found else []


def compile_for(record: Any, card: CardClass) -> Compiled:
    """record: one of compilations(). Raises what Triton raises where the kernel doesn't compile.

    Pointers and integers are taken to be divisible by 16, as at run time: else no load would be a vector's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parameters = record.function.params
    signature = {parameter.name: record.signature.get(parameter.name, "constexpr") for parameter in parameters}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, parameter in enumerate(parameters)
        if signature[parameter.name] not in ("constexpr", "fp32") and not parameter.do_not_specialize
    }
    constants = {name: record.constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(record.function, signature, constexprs=constants, attrs=divisible)
    architecture: Any = card.name if card.is_hip else int(card.name.removeprefix("sm_"))
    target = GPUTarget("hip" if card.is_hip else "cuda", architecture, 32)
    options = {"num_warps": record.n_warps, "num_stages": record.n_stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=target, options=options)
    metrics = _hip_figures(kernel.asm["amdgcn"]) if card.is_hip else _cuda_figures(kernel.asm["cubin"])
    n_loads = len(VECTOR_LOADS.findall(kernel.asm["amdgcn" if card.is_hip else "ptx"]))
    return Compiled(record.name, card, record.n_warps, *metrics, kernel.metadata.shared, n_loads)


def _cuda_figures(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes, as CUDA's own tool, which comes with Triton, reads them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", told), _number(r"STACK:(\d+)", told)


def _hip_figures(assembly: str) -> tuple[int, int]:
    spilled = 4 * (
        _number(r"\.vgpr_spill_count:\s*(\d+)", assembly) + _number(r"\.sgpr_spill_count:\s*(\d+)", assembly)
    )
    stack = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), max(spilled, stack)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's figures have no {pattern}: {text[:200]!r}.")
    return int(found[1])
