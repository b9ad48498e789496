"""A 7B model of random weights at several VRAM budgets: what its plan promises, and what it does. Needs a GPU.

    python tests/bench/bench_plans.py [--json] [--model llama-2-7b] [--budgets 2,4,6,0] [--tokens 64] [--alone]

Budgets are GiB of VRAM, 0 for all that is free. Predictions come from a quick profile of this machine, measured first
and kept. Each plan reads a prompt of 512 tokens and generates behind it; times are medians of three runs after one that
is not counted. Beside it, unless --alone and where they can be imported, with the same budgets: accelerate's offloading
(device_map, fp16 weights) and llama.cpp (Q4_0, as many layers on the GPU as fit). The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_ee.config import cache_folder, data_folder
from hetero_ee.decoding.benchmark import Bench
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.profiling.machine_profile import Wanted, machine_profile
from hetero_ee.runtime.opening import open_planned
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import random_weights
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.host.process import physical_core_count
from hetero_ee_profiles.units import GIB

PROMPT_TOKENS, CONTEXT_TOKENS, REPEATS = 512, 1024, 3
RESERVE_BYTES = 2**29  # of a budget that llama.cpp's workspaces and keys and values may take
NO_GPU = "There is no GPU that torch can use: nothing was measured."


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one budget. Rates are tokens per second; None: nothing is predicted, or it failed, see note."""

    engine: str
    budget_gib: float
    gpu_layers: int | None = None
    predicted_prompt: float | None = None
    prompt: float | None = None
    predicted_generated: float | None = None
    generated: float | None = None
    note: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--model", default="llama-2-7b", help="one whose shapes are known")
    parser.add_argument("--budgets", default="2,4,6,0", help="GiB of VRAM, 0 for all that is free")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--alone", action="store_true", help="no other engines")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    spec, budgets = known_spec(arguments.model), [float(each) for each in arguments.budgets.split(",")]
    profile = this_profile(spec)
    rows = list(our_rows(spec, random_weights(spec), profile, budgets, arguments.tokens))
    if not arguments.alone:
        rows += list(peer_rows(spec, budgets, arguments.tokens))
    document = {"model": arguments.model, "hardware": profile.name, "rows": [asdict(row) for row in rows]}
    if not arguments.json:
        print(table(rows))
    print(json.dumps(document))
    return 0


def this_profile(spec: ModelSpec) -> HardwareProfile:
    wanted = Wanted(quick=True, refresh=False, threads=(), command="tests/bench/bench_plans.py")
    return machine_profile(
        spec,
        wanted,
        data_folder=data_folder(),
        cache_folder=cache_folder(),
        disk_file=None,
        clock=time.perf_counter,
    )


def our_rows(
    spec: ModelSpec, weights: ModelWeights, profile: HardwareProfile, budgets: list[float], n_tokens: int
) -> Iterator[Row]:
    for budget in budgets:
        limits = Limits(
            vram_budget_bytes=int(budget * GIB) or None,
            context_tokens=CONTEXT_TOKENS,
            kv_type="fp16",
            threads=physical_core_count(),
        )
        yield measured(spec, weights, profile, limits, budget, n_tokens)


def measured(
    spec: ModelSpec, weights: ModelWeights, profile: HardwareProfile, limits: Limits, budget: float, n_tokens: int
) -> Row:
    plan = make_plan(spec, profile, limits, predict_at_tokens=PROMPT_TOKENS)
    told: list[str] = []
    opened = open_planned(
        spec, weights, PlanRequest(profile, limits, plan), limits.threads, time.perf_counter, told.append
    )
    try:

        def rate(n_prompt: int, n_gen: int, n_depth: int) -> float:
            bench = Bench(opened.executor, REPEATS, time.perf_counter)
            run = bench.run(n_prompt, n_gen, n_depth, chunk_tokens=plan.prefill_chunk_tokens)
            return statistics.median(run.samples_ts)

        return row_of(plan, budget, rate(PROMPT_TOKENS, 0, 0), rate(0, n_tokens, PROMPT_TOKENS), " ".join(told))
    finally:
        opened.executor.close()


def row_of(plan: Plan, budget: float, prompt: float, generated: float, note: str) -> Row:
    expected = plan.prediction
    return Row(
        "hetero-ee",
        budget,
        plan.gpu_layers,
        expected.prompt_tokens_per_s,
        prompt,
        expected.generated_tokens_per_s,
        generated,
        note,
    )


def peer_rows(spec: ModelSpec, budgets: list[float], n_tokens: int) -> Iterator[Row]:
    for name, generate in (("accelerate", accelerate_rate), ("llama.cpp", llama_cpp_rate)):
        for budget in budgets:
            usable_bytes = int(budget * GIB) or torch.cuda.mem_get_info()[0] - GIB
            try:
                n_layers, rate = generate(spec, usable_bytes, n_tokens)
                yield Row(name, budget, n_layers, generated=rate)
            except Exception as error:  # whatever a library raises is its row in the table
                yield Row(
                    name, budget, note=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
            torch.cuda.empty_cache()


def accelerate_rate(spec: ModelSpec, usable_bytes: int, n_tokens: int) -> tuple[int, float]:
    """Layers on the GPU, and tokens a second of the same shapes in fp16."""
    import accelerate
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_kv_heads,
        max_position_embeddings=spec.max_context_tokens,
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config).half().eval()
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(0.01)
    memory = {0: usable_bytes, "cpu": 2**40}
    places = accelerate.infer_auto_device_map(model, memory, no_split_module_classes=["LlamaDecoderLayer"])
    model = accelerate.dispatch_model(model, places)
    n_layers = sum(place == 0 for name, place in places.items() if name.startswith("model.layers."))
    ids = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64, device="cuda")

    def run(n: int) -> None:
        model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)
        torch.cuda.synchronize()

    return n_layers, generation_rate(run, n_tokens)


def generation_rate(run: Callable[[int], None], n_tokens: int) -> float:
    """Tokens a second behind the prompt: the time of n_tokens more, so that the prompt's own is not in it."""
    run(1)
    samples = []
    for _ in range(REPEATS):
        seconds = []
        for n in (1, 1 + n_tokens):
            start_s = time.perf_counter()
            run(n)
            seconds.append(time.perf_counter() - start_s)
        samples.append(n_tokens / (seconds[1] - seconds[0]))
    return statistics.median(samples)


def llama_cpp_rate(spec: ModelSpec, usable_bytes: int, n_tokens: int) -> tuple[int, float]:
    """The same of the same shapes in Q4_0."""
    import llama_cpp
    from llamacpp import write_gguf

    if not llama_cpp.llama_supports_gpu_offload():
        raise RuntimeError("llama-cpp-python was built without a GPU")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        write_gguf(spec, file)
        kv_bytes = 4 * spec.kv_size * CONTEXT_TOKENS
        n_layers = int((usable_bytes - RESERVE_BYTES) // (file.stat().st_size / spec.n_layers + kv_bytes))
        n_layers = max(0, min(n_layers, spec.n_layers))
        threads = physical_core_count()
        model = llama_cpp.Llama(
            str(file), n_gpu_layers=n_layers, n_ctx=CONTEXT_TOKENS, n_threads=threads, verbose=False
        )

        def run(n: int) -> None:
            model.reset()
            model.eval([100] * PROMPT_TOKENS)
            for _ in range(n - 1):
                model.eval([100])

        rate = generation_rate(run, n_tokens)
        model.close()
        return n_layers, rate


def table(rows: list[Row]) -> str:
    lines = [
        "| engine | VRAM GiB | GPU layers | prompt tok/s: predicted | achieved | text tok/s: predicted | achieved | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = (row.predicted_prompt, row.prompt, row.predicted_generated, row.generated)
        cells = " | ".join("" if rate is None else f"{rate:.1f}" for rate in rates)
        layers = "" if row.gpu_layers is None else row.gpu_layers
        lines.append(f"| {row.engine} | {row.budget_gib or 'all'} | {layers} | {cells} | {row.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
