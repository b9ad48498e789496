"""Classes of graphics cards: what a multiprocessor holds, and how many warps of a kernel fit into it.

Sources: CUDA C++ Programming Guide, table of technical specifications per compute capability; AMD RDNA 3 instruction
set guide and LLVM's AMDGPU user guide (gfx1100: a multiprocessor here is one SIMD32 unit).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardClass:
    """name: the compiler's target; cards: a few that belong here; registers are counted in threads' 32-bit ones.

    n_units: parts of a multiprocessor that a warp belongs to, each with its share of warps and registers.
    shared_bytes: of a multiprocessor; program_shared_bytes: what one program may have; reserved_bytes: what the system
    takes of them for every program.
    """

    name: str
    cards: str
    is_hip: bool
    max_warps: int
    max_programs: int
    n_units: int
    registers_a_unit: int
    register_step: int
    shared_bytes: int
    program_shared_bytes: int
    reserved_bytes: int

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
