"""Emulates launches of Triton kernels on CPU tensors.

Triton's own compiler lowers kernel[grid](...) to PTX, which is then executed. Neither time nor ptxas is modelled, which
removes, fuses and reorders instructions.
"""

import hashlib
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from hetero_ee_kernels import attention
from hetero_ee_kernels.tile_matrix import PLAIN, PTX, TURING
from tests.gpu.ptx.machine import Counts, Machine
from tests.gpu.ptx.memory import GlobalMemory
from tests.gpu.ptx.parsing import Kernel, PtxError
from tests.gpu.ptx.translation import translated
from tests.gpu_support import DEVICE, IS_INTERPRETED

Change = Any  # function from PTX text to PTX text, for mutants
ONLY_HERE = pytest.mark.skipif(DEVICE != "cpu" or IS_INTERPRETED, reason="launches run elsewhere")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A translated kernel with its PTX."""

    kernel: Kernel
    shared_bytes: int
    text: str


class Launch(NamedTuple):
    """One launch that was executed."""

    program: Program
    counts: Counts


@dataclass(slots=True)
class Launcher:
    """Executes launches for cards of one compute capability.

    Attributes:
        architecture: the compute capability, such as 86.
        folder: where PTX is cached for other processes of this test run; None for no cache.
        has_jitter: add errors of up to 2 units in the last place to approximate instructions, as hardware may.
        change: function applied to the PTX of every kernel before translation.
    """

    architecture: int
    folder: Path | None = None
    has_jitter: bool = False
    change: Change = str
    launches: list[Launch] = field(default_factory=list)
    _programs: dict[str, Program] = field(default_factory=dict)
    _binders: dict[Any, Any] = field(default_factory=dict)

    @property
    def isa(self) -> int:
        return TURING if self.architecture < 80 else PTX

    @contextmanager
    def installed(self) -> Iterator["Launcher"]:
        """Emulate every launch inside the block. Meanwhile torch fills new memory with NaN to reveal missing writes."""

        def run(function: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            self.launch(function, arguments, grid, options)

        was_deterministic = torch.are_deterministic_algorithms_enabled()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", run)
            patch.setattr(attention, "instructions", lambda tensor: self.isa)
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                yield self
            finally:
                torch.use_deterministic_algorithms(was_deterministic)

    @contextmanager
    def reported(self, node: pytest.Item) -> Iterator["Launcher"]:
        """Emulate the launches of a test, and add their counts to pytest's summary."""
        self.launches.clear()
        with self.installed():
            yield self
        node.user_properties.append(("ptx", [len(self.launches), sum(x.counts.n_instructions for x in self.launches)]))

    def launch(self, function: Any, arguments: Any, grid: Any, options: dict[str, Any]) -> None:
        """Execute one launch.

        Raises:
            PtxError: names the kernel, the instruction and its fault.
        """
        backend = make_backend(GPUTarget("cuda", self.architecture, 32))
        if function not in self._binders:
            self._binders[function] = create_function_from_signature(function.signature, function.params, backend)
        if options.get("ISA") == PLAIN:  # chosen by host code for CPU tensors
            options["ISA"] = self.isa
        bound, specialization, extra = self._binders[function](*arguments, **options)
        packed = function._pack_args(backend, options, bound, specialization, extra)
        compile_options, signature, constants, attributes = packed
        program = self._program(backend, function, signature, constants, attributes, compile_options)
        if any(value.device.type != "cpu" for value in bound.values() if hasattr(value, "data_ptr")):
            raise PtxError("only tensors on the CPU are known here")
        given = [(value, signature[name]) for name, value in bound.items() if signature[name] != "constexpr"]
        memory = GlobalMemory([value for value, _ in given if hasattr(value, "data_ptr")])
        values = [_packed(value, kind, memory) for value, kind in given]
        values += [bytes(8)] * (len(program.kernel.parameters) - len(values))  # Triton's scratch memory, null
        sizes = (*map(int, grid(bound) if callable(grid) else grid), 1, 1)[:3]
        named = dict(zip(program.kernel.parameters, values, strict=True))
        machine = Machine(program.kernel, sizes, named, memory, program.shared_bytes, has_jitter=self.has_jitter)
        try:
            self.launches.append(Launch(program, machine.run()))
        except PtxError as error:
            raise PtxError(f"{program.kernel.name}: {error}") from error

    def _program(self, backend: Any, function: Any, *parts: Any) -> Program:
        signature, constants, attributes, options = parts
        key = repr((self.architecture, function.cache_key, signature, sorted(constants.items(), key=repr)))
        key += repr((sorted(attributes.items()), str(options)))
        if key not in self._programs:
            file = self.folder and self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.ptx"
            if file and file.exists():
                found = file.read_text()
            else:
                found = compiled(ASTSource(function, signature, constants, attributes), backend, options)
                if file:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(found)
            shared_bytes, _, text = found.partition("\n")
            text = self.change(text)
            self._programs[key] = Program(translated(text), int(shared_bytes), text)
        return self._programs[key]


def compiled(source: Any, backend: Any, options: Any) -> str:
    """Compile a kernel. Return a line with the bytes of shared memory per program, and its PTX."""
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"target": backend.target, **options.__dict__}
    code_generation = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, code_generation, backend.get_module_map(), context)
    for name in [*stages][: [*stages].index("ptx") + 1]:
        module = stages[name](module, metadata)
    return f"{metadata.get('shared', 0)}\n{module}"


def _packed(value: Any, kind: str, memory: GlobalMemory) -> bytes:
    """Return the bytes of a kernel parameter; for a tensor, its device address."""
    if kind.startswith("*"):
        return struct.pack("<Q", memory.address(value.data_ptr()) if hasattr(value, "data_ptr") else 0)
    if kind.startswith("fp"):
        return struct.pack({"fp32": "<f", "fp64": "<d"}[kind], value)
    return (int(value) & (1 << 64) - 1).to_bytes(8, "little")[: max(1, int(re.sub(r"\D", "", kind)) // 8)]
