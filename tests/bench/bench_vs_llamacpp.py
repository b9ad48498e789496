"""One random model in both formats, run by this engine and by llama.cpp alternately. The last line is one JSON
document.

    pip install -e ".[bench]" && python tests/bench/bench_vs_llamacpp.py [--layers 8] [--context 16,2048,8192]

Llama-2-7B's layer shapes, 8 layers, 32,000 tokens, every matrix at 4.5 bits a weight (theirs Q4_0, ours codebook tiles,
head and embedding too), fp16 keys and values in both unless --kv-type says otherwise of ours. A step is a whole pass: m
tokens of one sequence behind a context, logits for all of them (for the prompt's last token in prefill). Long contexts
are random keys and values in ours, the first 512 tokens' again and again in theirs. Ratios are their median time over
ours, both measured alternately in one run; run it on a quiet machine. llama.cpp is built by pip for the machine it is
installed on; a build that does not run there is found first (--build-llamacpp). --active 0.1 adds the same model with a
ReLU FFN that lies neuron by neuron, of whose random gates that share is let through, as of a published ReLU model.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from llamacpp import LlamaCpp, build_without_amx, check_build, probe_command, system_info, write_gguf

from hetero_ee.config import cache_folder
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import KINDS, CpuKvCache
from hetero_ee.models.blocks import least_activations, neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import random_weights
from hetero_ee_profiles.host.process import physical_core_count

CONTEXT = 16
PREFILL_TOKENS, PROMPT_TOKENS = 128, 2048
PAUSE_S = 0.1  # both engines' threads spin for a while after their work; neither shall meet the other's
STEPS_A_TURN, LONG_S = 3, 0.3  # longer passes are timed once a turn
STEPS = {"decode": 1, "batch4": 4, "batch8": 8, "prefill128": PREFILL_TOKENS}
FLASH_ATTENTION = {"off": ("off",), "on": ("on",), "both": ("off", "on")}
FILL_TOKENS = 512
OURS = "ours"


class Model(Protocol):
    """One sequence of an engine's model."""

    def use_threads(self, threads: int) -> None: ...

    def fill(self, n_tokens: int) -> None:
        """Makes the context so long."""

    def step(self, m: int, n_wanted: int) -> float:
        """Seconds of m tokens behind the context, with logits of the last n_wanted of them."""
        ...

    def close(self) -> None: ...


def main() -> None:
    arguments = _arguments()
    if arguments.build_llamacpp:
        build_without_amx()
    torch.set_num_threads(1)
    spec = llama_spec(arguments.layers)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        use_kernel_cache(cache_folder())
        file = Path(folder) / "random.gguf"
        write_gguf(spec, file)
        check_build(probe_command(file, max(arguments.threads)))
        print(system_info(), flush=True)
        room = max(*arguments.context, arguments.prompt, 0) + PREFILL_TOKENS
        models: dict[str, Model] = {OURS: OurModel(spec, random_weights(spec, "int4"), room, arguments.kv_type)}
        if arguments.active:
            models[f"ours, {arguments.active:.0%} of neurons"] = sparse_model(spec, arguments, room)
            models[f"ours, {arguments.active:.0%} predicted"] = predicted_model(spec, arguments, room)
        for setting in FLASH_ATTENTION[arguments.flash_attention]:
            theirs = LlamaCpp(file, max(arguments.threads), room, flash_attention=setting == "on")
            models[f"flash attention {setting}"] = theirs
        for model in models.values():
            opened.callback(model.close)
        asked = arguments.context, arguments.threads, arguments.repeats, arguments.prompt
        rows = []
        print(heading(models))
        for row in measured(models, *asked):
            print(table_line(row), flush=True)
            rows.append(row)
    about = {"layers": arguments.layers, "kv_type": arguments.kv_type, "llama_cpp": system_info()}
    print(json.dumps(about | {"rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; JSON is always the last line")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=numbers, default=None, help="one or several, separated by commas")
    parser.add_argument("--context", type=numbers, default=[CONTEXT], help="tokens before a step, separated by commas")
    parser.add_argument("--prompt", type=int, default=0, help=f"tokens of a prompt from empty too, as {PROMPT_TOKENS}")
    parser.add_argument("--flash-attention", choices=sorted(FLASH_ATTENTION), default="on", help="in llama.cpp")
    parser.add_argument("--kv-type", choices=sorted(KINDS), default="fp16", help="ours; theirs is fp16")
    parser.add_argument("--active", type=float, default=0.0, help="share of neurons that a sparse model of ours uses")
    parser.add_argument("--build-llamacpp", action="store_true", help="build llama-cpp-python without AMX first")
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or sorted({physical_core_count(), 1}, reverse=True)
    return arguments


def sparse_model(spec: ModelSpec, arguments: argparse.Namespace, room_tokens: int) -> "OurModel":
    """Random gates are about normal, of unit variance: the limit is that distribution's quantile."""
    spec = replace(spec, activation="relu", neuron_major=True)
    least = statistics.NormalDist().inv_cdf(1 - arguments.active)
    weights = random_weights(spec, "int4")
    for block in neuron_blocks(spec):
        weights.vectors[least_activations(block)] = torch.full((spec.ffn_size,), least)
    return OurModel(spec, weights, room_tokens, arguments.kv_type)


def predicted_model(spec: ModelSpec, arguments: argparse.Namespace, room_tokens: int) -> "OurModel":
    """A random predictor, of the rank that calibration fits, lets twice as many neurons pass as are active: half of
    random gates are above 0, whatever it says."""
    laid_out = {"neuron_major": True, "first_in_rows": True, "predictor_rank": spec.hidden_size // 8}
    spec = replace(spec, activation="relu", **laid_out)
    weights = random_weights(spec, "int4")
    for name, vector in weights.vectors.items():
        if name.endswith("predictor_out_bias"):
            vector.fill_(statistics.NormalDist().inv_cdf(min(0.999, 2 * arguments.active)))
    return OurModel(spec, weights, room_tokens, arguments.kv_type)


def numbers(text: str) -> list[int]:
    """Ascending, as contexts are filled."""
    return sorted(map(int, text.split(",")))


def llama_spec(n_layers: int) -> ModelSpec:
    return read_spec(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": n_layers,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        }
    )


def measured(
    models: dict[str, Model], contexts: list[int], threads: list[int], repeats: int, prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    """Median seconds of each step by each model, all alternating."""
    places = [(0, {f"prefill{prompt_tokens}": prompt_tokens})] if prompt_tokens else []
    places += [(context, STEPS) for context in contexts]
    for context, steps in places:
        for model in models.values():
            model.use_threads(max(threads))
            model.fill(context)
        for n_threads in sorted(threads, reverse=True):
            for model in models.values():
                model.use_threads(n_threads)
            for name, m in steps.items():
                seconds = _medians(models, m, repeats)
                ratios = {each: value / seconds[OURS] for each, value in seconds.items() if each != OURS}
                yield {"threads": n_threads, "context": context, "step": name, "seconds": seconds, "ratios": ratios}


def _medians(models: dict[str, Model], m: int, repeats: int) -> dict[str, float]:
    n_wanted = m if m < PREFILL_TOKENS else 1
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            time.sleep(PAUSE_S)
            first_s = model.step(m, n_wanted)  # wakes its threads
            is_long = first_s > LONG_S
            times[name] += [first_s] if is_long else [model.step(m, n_wanted) for _ in range(STEPS_A_TURN)]
    return {name: statistics.median(found) for name, found in times.items()}


class OurModel:
    """The CPU's executor of each number of threads, on one cache."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, room_tokens: int, kv_type: str) -> None:
        self._spec, self._weights = spec, weights
        self._cache = CpuKvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, room_tokens, kind=kv_type)
        self._cache.open(0)
        self._executors: dict[int, Any] = {}
        self._executor: Any = None

    def use_threads(self, threads: int) -> None:
        from hetero_ee.runtime.executors.cpu import CpuExecutor

        if threads not in self._executors:
            room = self._cache.max_tokens
            self._executors[threads] = CpuExecutor(self._spec, self._weights, room, threads, cache=self._cache)
            self._executors[threads].prepare()
        self._executor = self._executors[threads]

    def fill(self, n_tokens: int) -> None:
        """With random keys and values, through the cache's own writer."""
        cache, heads = self._cache, (self._spec.n_kv_heads, self._spec.head_dim)
        cache.truncate(0, min(n_tokens, cache.length(0)))
        random = torch.Generator().manual_seed(n_tokens)
        for first in range(cache.length(0), n_tokens, FILL_TOKENS):
            batch = Batch.of_sequence(0, first, [0] * min(FILL_TOKENS, n_tokens - first))
            cache.admit(batch)
            for layer in range(self._spec.n_layers):
                keys, values = (torch.randn(len(batch), *heads, generator=random) for _ in range(2))
                cache.write(layer, batch, keys, values)

    def step(self, m: int, n_wanted: int) -> float:
        held, size = self._cache.length(0), self._executor.prompt_chunk_tokens
        token_ids = [100 + number % 1000 for number in range(m)]
        start_s = time.perf_counter()
        if m < PREFILL_TOKENS:
            self._executor.logits(Batch.of_sequence(0, held, token_ids), range(m - n_wanted, m))
        else:
            chunks = (Batch.of_sequence(0, held + at, token_ids[at : at + size]) for at in range(0, m, size))
            self._executor.prompt(chunks)
        elapsed_s = time.perf_counter() - start_s
        self._cache.truncate(0, held)
        return elapsed_s

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()


def heading(models: dict[str, Model]) -> str:
    names = [name if name.startswith(OURS) else f"llama.cpp {name}" for name in models]
    columns = ["threads", "context", "step", *(f"{name} ms" for name in names), "ratio"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def table_line(row: dict[str, Any]) -> str:
    times = [f"{seconds * 1e3:.1f}" for seconds in row["seconds"].values()]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"].values())
    return f"| {row['threads']} | {row['context']:,} | {row['step']} | {' | '.join(times)} | {ratios} |"


if __name__ == "__main__":
    main()
