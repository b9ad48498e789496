"""Compiles every kernel for a class of graphics cards without having one, and reads what the compiler made of it.

Sources: CUDA C++ Programming Guide, table of technical specifications per compute capability; AMD RDNA 3 instruction
set guide and LLVM's AMDGPU user guide (gfx1100: a multiprocessor here is one SIMD32 unit).
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from hetero_ee_kernels.checks import UNFUSED
from hetero_ee_kernels.tile_matrix import GCN, PLAIN, PTX, TURING

FUSIBLE = re.compile(r"\b(?:mul|add|sub)\.(?:ftz\.)?f(?:16|32|64)\b")  # with a rounding, as in mul.rn.f32, it is not
MMA_OF_LANES = re.compile(r'elementwise_inline_asm "[^"]*mma\.sync[^\n]*-> tensor<[^,>]*, (#\w+)>')
# A warp's neighbours are neighbours of the last axis, one element each: what a fragment takes a lane to be.
LANES_IN_ORDER = (
    r"{} = #ttg\.blocked<{{sizePerThread = \[1, 1, 1\], threadsPerWarp = \[1, 1, 32\], warpsPerCTA = \[1, 1, "
)
VECTOR_LOADS = re.compile(r"ld\.global\S*\.(?:v4\.\w32|v8\.\w16|v2\.\w64)|(?:global|buffer)_load_b128")  # 16 bytes


@dataclass(frozen=True, slots=True, eq=False)
class Compilation:
    """One specialization of one kernel. gpu_compilations.py lists them."""

    name: str
    function: Any  # the @triton.jit function
    signature: dict[str, str]  # type of each run-time argument by name: "*fp16", "i32"
    constants: dict[str, Any]  # value of every other argument, None for a pointer that is not given
    n_warps: int
    is_memory_bound: bool = False  # its large operand must be read 16 bytes at a time
    isa: int = PLAIN  # whose instructions it holds, of tile_matrix's PLAIN, GCN, PTX: those of NVIDIA's cards
    is_modern: bool | None = None  # True: only for NVIDIA's cards from sm_80 on; False: only for others


@dataclass(frozen=True, slots=True)
class CardClass:
    """Registers are counted in threads' 32-bit ones."""

    name: str  # the compiler's target
    cards: str  # a few that belong here
    is_hip: bool
    max_warps: int
    max_programs: int
    n_units: int  # parts of a multiprocessor that a warp belongs to, each with its share of warps and registers
    registers_a_unit: int
    register_step: int
    shared_bytes: int  # of a multiprocessor
    program_shared_bytes: int  # what one program may have
    reserved_bytes: int  # what the system takes of shared_bytes for every program

    def runs(self, record: Compilation) -> bool:
        """Whether the product launches the kernel on such cards."""
        is_modern = not self.is_hip and self.name != "sm_75"
        return record.isa in (PLAIN, GCN if self.is_hip else PTX) and record.is_modern in (None, is_modern)

    def n_resident_warps(self, registers: int, shared_bytes: int, n_warps: int) -> int:
        """Warps of a multiprocessor that can be there at once, for a program of n_warps."""
        warp_registers = -(-max(1, registers) * 32 // self.register_step) * self.register_step
        by_registers = min(self.max_warps, self.n_units * (self.registers_a_unit // warp_registers)) // n_warps
        by_shared = self.shared_bytes // max(1, shared_bytes + self.reserved_bytes)
        return min(by_registers, by_shared, self.max_programs) * n_warps

    def occupancy(self, registers: int, shared_bytes: int, n_warps: int) -> float:
        """The same as a share of the warps that a multiprocessor can hold."""
        return self.n_resident_warps(registers, shared_bytes, n_warps) / self.max_warps


def _cuda(
    architecture: int, cards: str, max_warps: int, max_programs: int, shared_kib: tuple[int, int], reserved: int
) -> CardClass:
    shared, program = (size * 1024 for size in shared_kib)
    return CardClass(
        f"sm_{architecture}", cards, False, max_warps, max_programs, 4, 16384, 256, shared, program, reserved
    )


CARD_CLASSES = (
    _cuda(75, "RTX 20, GTX 16, T4", 32, 16, (64, 64), 0),
    _cuda(80, "A100", 64, 32, (164, 163), 1024),
    _cuda(86, "RTX 30, A10", 48, 16, (100, 99), 1024),
    _cuda(89, "RTX 40, L4", 48, 24, (100, 99), 1024),
    _cuda(90, "H100, H200", 64, 32, (228, 227), 1024),
    _cuda(120, "RTX 50", 48, 24, (100, 99), 1024),
    CardClass("gfx1100", "RX 7900", True, 16, 16, 1, 1536 * 32, 24 * 32, 32 * 1024, 64 * 1024, 0),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel on one class of cards."""

    name: str
    card: CardClass
    n_warps: int
    registers: int
    stack_bytes: int  # more than 0 where registers were spilled
    shared_bytes: int
    n_vector_loads: int  # of 16 bytes
    n_fusible: int = 0  # multiplications and additions that NVIDIA's assembler may make one of, with other bits
    has_lanes_in_order: bool = True  # matrix products find in each lane what its fragment holds

    @property
    def occupancy(self) -> float:
        return self.card.occupancy(self.registers, self.shared_bytes, self.n_warps)


def compile_for(record: Compilation, card: CardClass) -> Compiled:
    """Raises what Triton raises where the kernel doesn't compile."""
    kernel = _kernel(record, card)
    metrics = _hip_metrics(kernel.asm["amdgcn"]) if card.is_hip else _cuda_metrics(kernel.asm["cubin"])
    n_loads = len(VECTOR_LOADS.findall(kernel.asm["amdgcn" if card.is_hip else "ptx"]))
    n_fusible = len(FUSIBLE.findall(kernel.asm.get("ptx", "")))
    layouts = set(MMA_OF_LANES.findall(kernel.asm["ttgir"]))
    in_order = all(re.search(LANES_IN_ORDER.format(layout), kernel.asm["ttgir"]) for layout in layouts)
    in_order = in_order and bool(layouts) == ("mma.sync" in kernel.asm["ttgir"])
    shared = kernel.metadata.shared
    return Compiled(record.name, card, record.n_warps, *metrics, shared, n_loads, n_fusible, in_order)


def reduction_layouts(record: Compilation, card: CardClass) -> set[tuple[str, str]]:
    """Shape and layout over threads of all that is reduced: where they are the same, so is the order of sums."""
    text = _kernel(record, card).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<([\dx]+)x\w+, (#[^>]*)>', text, re.DOTALL)
    return {(shape, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), of)) for shape, of in reduced}


def _kernel(record: Compilation, card: CardClass) -> Any:
    """Options are those of the product's launches. Pointers and integers are taken to be divisible by 16, as at run
    time: else no load would be a vector's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parameters = record.function.params
    signature = {parameter.name: record.signature.get(parameter.name, "constexpr") for parameter in parameters}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, parameter in enumerate(parameters)
        if signature[parameter.name] not in ("constexpr", "fp32") and not parameter.do_not_specialize
    }
    given = record.constants | ({"ISA": TURING} if record.isa == PTX and card.name == "sm_75" else {"ISA": record.isa})
    constants = {name: given[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(record.function, signature, constexprs=constants, attrs=divisible)
    architecture: Any = card.name if card.is_hip else int(card.name.removeprefix("sm_"))
    target = GPUTarget("hip" if card.is_hip else "cuda", architecture, 32)
    options = {"num_warps": record.n_warps, "num_stages": 1} | UNFUSED
    return triton.compile(source, target=target, options=options)


def _cuda_metrics(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes, as CUDA's own tool, which comes with Triton, reads them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", told), _number(r"STACK:(\d+)", told)


def _hip_metrics(assembly: str) -> tuple[int, int]:
    spilled = 4 * (
        _number(r"\.vgpr_spill_count:\s*(\d+)", assembly) + _number(r"\.sgpr_spill_count:\s*(\d+)", assembly)
    )
    stack = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), max(spilled, stack)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's output has no {pattern}: {text[:200]!r}.")
    return int(found[1])
