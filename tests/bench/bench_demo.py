"""How long the demo model takes to say something, as a user waits for it. Prints a table; last line is JSON.

    python tests/bench/bench_demo.py [--runs 5] [--threads N]

first_ever_s: process start to first text with an empty cache folder, conversion included. first_token_s: the same with
the model converted. The rates are those of `hetero-ee generate --json` over 128 tokens after a prompt of 128.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "hetero_ee_cli", "generate"]
PROMPT = (
    "Once upon a time there was a little girl who lived in a small house near the forest with her mom and dad. " * 5
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    flags = ["-t", str(arguments.threads)]
    first_ever, first, documents = [], [], []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as cache:
            first_ever.append(seconds_to_first_text(Path(cache), flags))
            first.append(seconds_to_first_text(Path(cache), flags))
            documents.append(rates(Path(cache), flags))
    metrics = {
        "first_ever_s": statistics.median(first_ever),
        "first_token_s": statistics.median(first),
        "prompt_tokens_per_s": statistics.median(d["prompt_tokens_per_s"] for d in documents),
        "generated_tokens_per_s": statistics.median(d["generated_tokens_per_s"] for d in documents),
        "peak_memory_bytes": max(d["peak_memory_bytes"] for d in documents),
    }
    for name, value in metrics.items():
        print(f"{name:24} {value:,.2f}")
    print(json.dumps({"runs": arguments.runs, "threads": arguments.threads, **metrics}))


def folders(cache: Path) -> dict[str, str]:
    """Environment of a machine that has only what lies in `cache`."""
    return {"HETERO_EE_CACHE_DIR": str(cache), "HETERO_EE_DATA_DIR": str(cache / "data")}


def seconds_to_first_text(cache: Path, flags: list[str]) -> float:
    start = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, "Once upon a time", "-n", "8", *flags],
        env=os.environ | folders(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    elapsed = time.perf_counter() - start
    process.stdout.read()
    assert process.wait() == 0 and first
    return elapsed


def rates(cache: Path, flags: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [*COMMAND, PROMPT, "-n", "128", "--json", "--temp", "0.8", "-s", "1", *flags],
        env=os.environ | folders(cache),
        capture_output=True,
        check=True,
    )
    document: dict[str, float] = json.loads(done.stdout)
    return document


if __name__ == "__main__":
    main()
