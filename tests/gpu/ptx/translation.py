"""Translates PTX to Python. Each basic block becomes a function on arrays with one element per thread.

A register of b bits is an array of unsigned b-bit integers.
"""

import re
from typing import Any

import numpy as np

from tests.gpu.ptx import arithmetic
from tests.gpu.ptx.arithmetic import FLOAT, SIGNED, UNSIGNED
from tests.gpu.ptx.parsing import Block, Instruction, Kernel, PtxError, parse

NAMES: dict[str, Any] = {name: value for name, value in vars(arithmetic).items() if callable(value)} | {"np": np}
NAMES |= {f"U{bits}": kind for bits, kind in UNSIGNED.items()} | {f"I{bits}": kind for bits, kind in SIGNED.items()}
NAMES |= {f"F{bits}": kind for bits, kind in FLOAT.items()}


def translated(text: str) -> Kernel:
    """Parse a module and translate its blocks. Raises: PtxError: if an instruction is unknown."""
    from tests.gpu.ptx.instructions import emit

    kernel = parse(text)
    writers = [BlockWriter(kernel, block, emit) for block in kernel.blocks]
    needed = set[str]().union(*(writer.live_in for writer in writers))
    kernel.never_written = needed - set[str]().union(*(writer.written for writer in writers))
    for block, writer in zip(kernel.blocks, writers, strict=True):
        block.inputs, block.outputs = sorted(writer.live_in), sorted(writer.written & needed)
        block.run = writer.function(block)
    return kernel


def split_type(name: str) -> tuple[str, int]:
    """Split "u32" into "u" and 32."""
    found = re.fullmatch(r"([usbf])(\d+)", name)
    if found is None:
        raise ValueError(f"{name} is not a type")
    return found[1], int(found[2])


def raw(kind: str) -> str:
    """Return the type for a move of the same bits. Signed types stay signed, since moves may sign-extend them."""
    return kind if kind[0] == "s" else f"b{split_type(kind)[1]}"


def vector(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} \n\t").split(",")]


class BlockWriter:
    """Writes the Python source of one basic block.

    Args:
        emit: writes the source of one instruction, see instructions.py.
    """

    def __init__(self, kernel: Kernel, block: Block, emit: Any) -> None:
        self.kernel = kernel
        self.lines: list[str] = []
        self.written: set[str] = set()
        self.live_in: set[str] = set()  # registers that the block reads before it writes them
        self.condition = "None"  # expression that tells which threads jump or end
        self._names = dict(NAMES)
        for instruction in block.instructions:
            try:
                emit(self, instruction)
            except (KeyError, AssertionError, ValueError, IndexError) as error:
                raise PtxError(f"not translated: {instruction}: {error!r}") from error

    def function(self, block: Block) -> Any:
        arguments = "".join(f", {self._local(name)}" for name in block.inputs)
        results = "".join(f"{self._local(name)}, " for name in block.outputs)
        lines = [f"def run(m, c{arguments}):", *self.lines, f"return ({results}), {self.condition}"]
        exec(compile("\n    ".join(lines), f"<{self.kernel.name}>", "exec"), self._names)  # noqa: S102
        return self._names["run"]

    def source(self, operand: str, kind: str) -> str:
        """Return the Python expression of an operand as type `kind`: an array, or a NumPy scalar for a constant."""
        letter, bits = split_type(kind)
        view = "" if letter in "ub" else f".view({'I' if letter == 's' else 'F'}{bits})"
        if operand in self.kernel.widths:
            width = self.kernel.widths[operand]
            assert width >= bits, f"{operand} has {width} bits"
            return self._read(operand) + (f".astype(U{bits})" if width > bits else "") + view
        if operand.startswith("%"):
            return f"m.special(c, {operand[1:]!r}){view}"
        if operand in self.kernel.symbols:
            number = self.kernel.symbols[operand]
        else:
            number = int(operand[2:], 16) if re.match(r"0[fFdD]", operand) else int(operand.rstrip("U"), 0)
        name = f"k{bits}_{number & ((1 << bits) - 1):x}"
        self._names[name] = UNSIGNED[bits](number & ((1 << bits) - 1))
        return name + view

    def predicate(self, operand: str) -> str:
        name = operand.lstrip("!")
        if name in self.kernel.widths:
            return f"{'~' * operand.startswith('!')}{self._read(name)}"
        return f"m.full(c, np.bool_({bool(int(name))}))"

    def guard(self, i: Instruction) -> str:
        return self.predicate("!" * i.is_negated + i.guard) if i.guard else "None"

    def assign(self, i: Instruction, register: str, expression: str, kind: str) -> None:
        """Append an assignment of an expression to a register, for the threads whose guard is true.

        Args:
            kind: the expression's type, such as s32. Narrower values are extended to the register's width.
        """
        if register == "_":
            return
        width = self.kernel.widths[register]
        if kind != "pred":
            letter, bits = split_type(kind)
            assert width >= bits
            if letter == "f" or (letter == "s" and width == bits):
                expression = f"({expression}).view(U{bits})"
            if width > bits:
                signed = letter == "s"
                expression = f"({expression}).astype({'I' if signed else 'U'}{width})" + f".view(U{width})" * signed
        if i.guard:
            expression = f"np.where({self.guard(i)}, {expression}, {self._read(register)})"
        self.lines.append(f"{self._local(register)} = m.full(c, {expression})")
        self.written.add(register)

    def results(self, i: Instruction, registers: list[str], call: str, kind: str) -> None:
        """Append a call, and assign the elements that it returns to registers."""
        self.lines.append(f"t = {call}")
        view = f".view(I{kind[1:]})" if kind[0] == "s" else ""
        for place, register in enumerate(registers):
            self.assign(i, register, f"t[{place}]{view}", kind)

    def address(self, operand: str, bits: int) -> str:
        found = re.fullmatch(r"([%\w$@]+)\s*(?:\+\s*(-?\d+))?", operand.strip("[] \t\n"))
        assert found, operand
        offset = f" + U{bits}({int(found[2]) & ((1 << bits) - 1)})" if found[2] else ""
        return f"m.full(c, {self.source(found[1], f'u{bits}')}{offset})"

    def values(self, registers: list[str], kind: str) -> str:
        """Return the expression of a tuple with each register's value as an array, also for constants."""
        return "(" + "".join(f"m.full(c, {self.source(name, kind)}), " for name in registers) + ")"

    def _read(self, register: str) -> str:
        if register not in self.written:
            self.live_in.add(register)
        return self._local(register)

    @staticmethod
    def _local(register: str) -> str:
        return "r_" + re.sub(r"\W", "_", register)
