"""The machine code that ptxas makes of a kernel's PTX: instructions of its main loop, and the pipe that limits them.

Throughputs are thread instructions per clock and multiprocessor on sm_86 and sm_89. Source: CUDA C++ Programming Guide,
throughput of native arithmetic instructions; of tensor cores: NVIDIA Ampere GA102 whitepaper, 1,024 products of
int8, 256 of fp16 with fp32 sums.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

PIPES = {  # opcodes by their beginnings
    "FP32": (128, ("FFMA", "FADD", "FMUL", "HADD2", "HFMA2")),
    "special": (16, ("MUFU", "I2F.", "F2I", "F2F")),
    "tensor": (8, ("IMMA",)),
    "tensor, fp16": (4, ("HMMA",)),
    "memory": (32, ("LD", "ST", "SHFL", "REDUX", "RED.", "ATOM")),
    "IMAD": (64, ("IMAD", "IDP")),
    "none": (128, ("BAR", "BRA", "U", "MOV", "CS2R", "S2", "EXIT", "BSSY", "BSYNC", "WARPSYNC")),
    "integer": (64, ("",)),  # compare, select, shift, logic
}
ISSUED = 128


@dataclass(frozen=True, slots=True)
class Sass:
    """Counts of the longest innermost loop with loads, or of the whole kernel if it has none."""

    per_ptx: float  # SASS instructions per PTX instruction
    pipe: str  # the one that needs most clocks
    clocks_per_ptx: float  # of that pipe, per PTX instruction of a thread, on one multiprocessor


def assembled(ptx: str, architecture: int) -> Sass:
    """Assemble a kernel and compare its main loop with that of the PTX."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "a.ptx"), Path(folder, "a.cubin")
        source.write_text(ptx)
        ptxas = [knobs.nvidia.ptxas.path, "--fmad=false", f"--gpu-name=sm_{architecture}", source, "-o", binary]
        subprocess.run(ptxas, check=True, capture_output=True)
        nvdisasm = [knobs.nvidia.nvdisasm.path, "-c", binary]
        text = subprocess.run(nvdisasm, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"/\*[0-9a-f]+\*/|//.*", "", text)
    machine, source_code = main_loop(text), main_loop(re.sub(r"//.*|\{\n|\}\n", "", ptx))
    n_copies = n_loads(machine) / max(1, n_loads(source_code)) or 1.0  # ptxas may unroll
    clocks = Counter({"issue": len(machine) / ISSUED})
    for opcode in machine:
        pipe, throughput = next((name, each) for name, (each, begins) in PIPES.items() if opcode.startswith(begins))
        clocks[pipe] += 1 / throughput
    (pipe, most), n = clocks.most_common(1)[0], len(source_code) * n_copies
    return Sass(len(machine) / n, pipe, most / n)


def n_loads(opcodes: list[str]) -> int:
    return sum(opcode.startswith(("LDG", "ld.global")) for opcode in opcodes)


def main_loop(text: str) -> list[str]:
    """Return the opcodes of the longest innermost loop with loads, or of the whole kernel if it has none."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.?[$\w.]+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"\s+(?:@!?%?\w+\s+)?([A-Za-z][\w.:]+)\s(.*)", line):
            opcodes.append(found[1])
            target = re.search(r"(\.L_\w+|\$L\w+)", found[2])
            if found[1].upper().startswith("BRA") and target and labels.get(target[1], len(opcodes)) < len(opcodes) - 1:
                loops.append((labels[target[1]], len(opcodes)))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max((opcodes[a:b] for a, b in inner if n_loads(opcodes[a:b])), key=len, default=opcodes)
