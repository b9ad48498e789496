"""Parses PTX text into basic blocks of instructions, by the grammar of the PTX ISA manual."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DECLARATION = re.compile(r"\s*\.(reg|pragma|shared|local|param)\b([^;]*);")
TOKEN = re.compile(r"\s*(?:(\{)|(\})|([$\w]+):|\.[^;{}\n]*\n|([^;]*?;))")
BARRIER = re.compile(r"(bar|barrier)(\.cta)?\.(sync|red|arrive)")
ACCESSES = ("ld.", "st.", "atom.", "ldmatrix", "stmatrix")


class PtxError(Exception):
    """A fault of the emulated kernel, or an instruction that the emulator does not support."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction. Registers of inner scopes are renamed to unique names."""

    opcode: str
    operands: list[str]
    guard: str  # predicate register, or empty
    is_negated: bool
    line: int
    site: int  # index in Kernel.sites if it accesses memory, else -1

    def __str__(self) -> str:
        guard = f"@{'!' * self.is_negated}{self.guard} " if self.guard else ""
        return f"line {self.line}: {guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(slots=True)
class Block:
    """A basic block. translation.py fills in `run`, `inputs` and `outputs`."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    run: Any = None  # function (machine, context, *inputs) -> (outputs, condition)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    end: str = "fall"  # how it ends: fall, bra, ret or bar
    target: int = -1  # index of the block that `bra` jumps to


@dataclass(slots=True)
class Kernel:
    """A parsed kernel, the only entry of a PTX module."""

    name: str
    parameters: list[str]
    n_threads: int  # threads per program
    symbols: dict[str, int]  # byte offsets in shared memory, by name
    static_shared_bytes: int
    blocks: list[Block] = field(default_factory=lambda: [Block("entry")])
    widths: dict[str, int] = field(default_factory=dict)  # bits of each register, 1 for predicates
    sites: list[Instruction] = field(default_factory=list)  # instructions that access memory, for messages
    never_written: set[str] = field(default_factory=set)  # registers that are read but that no instruction writes


def parse(text: str) -> Kernel:
    """Parse a module with one entry.

    Raises:
        PtxError: if there is no entry, or a line cannot be parsed.
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    head = re.search(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
    threads = head and re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", head[3])
    if not head or not threads:
        raise PtxError("the module has no entry with a number of threads")
    symbols, static_bytes = {}, 0
    for name, size in re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d*)\]", text):
        symbols[name] = static_bytes
        static_bytes += -(-int(size or 0) // 16) * 16
    parameters = [words[-1] for part in head[2].split(",") if (words := part.split())]
    n_threads = int(np.prod([int(n) for n in threads[1].split(",")]))
    kernel = Kernel(head[1], parameters, n_threads, symbols, static_bytes)
    _Body(kernel, text).parse(head.end())
    return kernel


class _Body:
    """Parser of a kernel's body. Braces open scopes with their own registers."""

    def __init__(self, kernel: Kernel, text: str) -> None:
        self.kernel, self.text = kernel, text
        self.labels: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]
        self.n_scopes = 0

    def parse(self, at: int) -> None:
        while self.scopes:
            if found := DECLARATION.match(self.text, at):
                if found[1] == "reg":
                    self._declare(*found[2].split(None, 1))
            elif (found := TOKEN.match(self.text, at)) is None:
                raise PtxError(f"cannot parse {self.text[at : at + 80]!r}")
            elif found[1]:
                self.n_scopes += 1
                self.scopes.append({})
            elif found[2]:
                self.scopes.pop()
            elif found[3]:
                self._label(found[3])
            elif found[4]:
                self._append(self._instruction(found[4].rstrip(";"), self.text.count("\n", 0, found.start(4)) + 1))
            at = found.end()
        if not self.kernel.blocks[-1].instructions:
            self.kernel.blocks[-1].end = "ret"
        for block in self.kernel.blocks:
            if block.end == "bra":
                block.target = self.labels[block.instructions[-1].operands[0]]

    def _declare(self, kind: str, names: str) -> None:
        bits = 1 if kind == ".pred" else int(re.sub(r"\D", "", kind))
        for name in map(str.strip, names.split(",")):
            if many := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
                self.kernel.widths |= {f"{many[1]}{i}": bits for i in range(int(many[2]))}
            else:
                self.scopes[-1][name] = f"{name}@{self.n_scopes}"
                self.kernel.widths[f"{name}@{self.n_scopes}"] = bits

    def _label(self, name: str) -> None:
        if name.startswith("$L__BB"):  # other directives are for debuggers
            if self.kernel.blocks[-1].instructions:
                self.kernel.blocks.append(Block(name))
            self.labels[name] = len(self.kernel.blocks) - 1

    def _append(self, instruction: Instruction) -> None:
        block, name = self.kernel.blocks[-1], instruction.opcode.split(".")[0]
        block.instructions.append(instruction)
        if instruction.site >= 0:
            self.kernel.sites.append(instruction)
        if name in ("bra", "ret", "exit") or BARRIER.match(instruction.opcode):
            block.end = {"exit": "ret", "barrier": "bar"}.get(name, name)
            self.kernel.blocks.append(Block(""))

    def _instruction(self, text: str, line: int) -> Instruction:
        found = re.match(r"\s*(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)$", text, re.DOTALL)
        if found is None:
            raise PtxError(f"cannot parse {text!r}")
        operands = [part.strip() for part in re.split(r",(?![^{\[(]*[}\])])", found[4]) if part.strip()]
        operands = [re.sub(r"(?<![\w.%$])[A-Za-z_$%][\w$]*", lambda n: self._renamed(n[0]), part) for part in operands]
        site = len(self.kernel.sites) if found[3].startswith(ACCESSES) else -1
        return Instruction(found[3], operands, self._renamed(found[2] or ""), bool(found[1]), line, site)

    def _renamed(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)
