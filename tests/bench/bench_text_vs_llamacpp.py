"""A text by this engine in full mode, in exact mode with synthetic acceptance, and by llama.cpp, in turn. The last line
is one JSON document.

    pip install -e ".[bench]" && python tests/bench/bench_text_vs_llamacpp.py --acceptance 0.78 [--layers 32]

Llama-2-7B's layer shapes with random weights as in bench_vs_llamacpp.py. Exact mode drafts with an EAGLE-1 head of
random weights: the head, the verification and everything between are computed and timed by the clock; whether a draft
is right is drawn, by position (synthetic_drafts.py). llama.cpp decodes token by token.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from bench_plans import this_profile
from bench_vs_llamacpp import CONTEXT, llama_spec, random_weights
from llamacpp import LlamaCpp, write_gguf
from synthetic_drafts import synthetic, write_synthetic_head

from hetero_ee.decoding.benchmark import Bench, MakeMode
from hetero_ee.decoding.loop import FullMode
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.statistics import DraftRates
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.runtime.opening import open_planned
from hetero_ee.speculation.exact import ExactMode
from hetero_ee.speculation.opening import DraftKnowledge, open_drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.host.process import physical_core_count

TextRun = Callable[[], float]  # generates the text, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", default="0.78", help="rates by position, separated by commas")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_core_count())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec, tokens = llama_spec(arguments.layers), arguments.tokens
    rates = DraftRates("synthetic", tuple(map(float, arguments.acceptance.split(","))), 0.0)
    counts = DraftCounts()
    with tempfile.TemporaryDirectory() as folder:
        use_kernel_cache(Path(folder))
        write_gguf(spec, Path(folder) / "random.gguf")
        head = Path(folder) / "head"
        head.mkdir()
        write_synthetic_head(head, spec, rates, None)
        with our_texts(spec, random_weights(spec), head, rates, arguments.threads, tokens, counts) as ways:
            ways["llama.cpp"] = their_text(Path(folder) / "random.gguf", arguments.threads, tokens)
            found: dict[str, list[float]] = {name: [] for name in ways}
            for round_ in range(arguments.repeats + 1):
                for name, run in ways.items():
                    seconds = run()
                    if round_:
                        found[name].append(seconds)
    rows = {name: tokens / statistics.median(seconds) for name, seconds in found.items()}
    drafted = counts.statistics(spec.n_layers, 0)
    print("| way | tokens/s | over full | over llama.cpp |\n|---|---|---|---|")
    for name, rate in rows.items():
        print(f"| {name} | {rate:.2f} | {rate / rows['full']:.2f} | {rate / rows['llama.cpp']:.2f} |")
    print(f"exact: {drafted.tokens_per_pass:.2f} tokens a pass, {drafted.acceptance:.0%} of drafts accepted")
    print(json.dumps({"tokens_per_s": rows, "seconds": found, "tokens_per_pass": drafted.tokens_per_pass}))


@contextmanager
def our_texts(
    spec: ModelSpec,
    weights: ModelWeights,
    head: Path,
    rates: DraftRates,
    threads: int,
    tokens: int,
    counts: DraftCounts,
) -> Iterator[dict[str, TextRun]]:
    """Both modes on one executor, opened as the engine opens a model."""
    profile, knowledge = this_profile(spec), DraftKnowledge(draft_head=head, is_asked=True)
    known = knowledge.statistics(spec, profile, threads)
    limits = Limits(context_tokens=512, mode="exact", threads=threads, gpu_layers=0)
    opened = open_planned(spec, weights, PlanRequest(profile, limits, None, known), threads, time.perf_counter, print)
    drafting = open_drafting(knowledge, opened, profile, print)
    assert drafting is not None, "exact mode drafts"
    try:
        executor, clock = opened.executor, time.perf_counter
        bench = Bench(executor, 1, clock)
        text = bench.text(CONTEXT + tokens + 1)
        drawn = synthetic(drafting, text, rates, spec.vocab_size)

        def run(mode: MakeMode) -> float:
            return bench.text_run(mode, mode, tokens, CONTEXT).samples_s[0]

        full, exact = partial(FullMode, executor, clock), partial(ExactMode, executor, drawn, counts, clock)
        yield {"full": lambda: run(full), "exact": lambda: run(exact)}
    finally:
        opened.executor.close()


def their_text(file: Path, threads: int, tokens: int) -> TextRun:
    """One token after another behind the same context: as many steps as tokens."""
    model = LlamaCpp(file, threads, CONTEXT + tokens, flash_attention=True)
    model.fill(CONTEXT)
    return lambda: sum(model.step(1, 1) for _ in range(tokens))


if __name__ == "__main__":
    main()
