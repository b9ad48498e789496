"""Everything that is to be known of a GPU on the day there is one, by one command, in at most eight minutes.

    pip install -e ".[test]"
    python tests/bench/bench_gpu.py [--json FILE] [--minutes 8] [--model llama-2-7b] [--dry-run]

Needs no network once that is installed. What does not fit into the minutes is left out and said so. In this order:
machine     a full profile: products as a share of the card's measured copy bandwidth, kappa, prefill, launches, link,
            the CPU's kernels by threads
kernels     the tests of every kernel, on the card, in at most a quarter of the minutes that are left
launches    a small launch by itself, and as one of many in a graph
plans       the model with random weights, 100, 75, 50 and 25 % of its layers on the card: text, prompt and exact mode
            (acceptance 0.78, synthetic) predicted and achieved, whether exact mode's text is full mode's, and how much
            of the text is that of the first row
libraries   bitsandbytes and torch at the same shapes, where they are installed
Prints Markdown; --json writes all figures, those so far after each part and each row. Ends with 1 where something
failed, was left out or is wrong. --dry-run runs every line on the CPU behind a stand-in for the GPU's driver, with a
tiny model: its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from bench_gpu_ops import machine as card
from bench_gpu_ops import other_libraries
from gpu_tables import agreeing_tokens, failures, goals, markdown, products
from synthetic_drafts import synthetic, write_synthetic_head

from hetero_ee.config import cache_folder
from hetero_ee.decoding.benchmark import Bench as TimedBench
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.registry import Registry
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.statistics import DraftRates, Statistics
from hetero_ee.planning.times.prediction import predicted_run_s, predicted_text_s
from hetero_ee.profiling.machine_profile import versions
from hetero_ee.profiling.measure import Subject, measure_profile
from hetero_ee.profiling.preset import FULL, Preset
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exact import ExactMode
from hetero_ee.speculation.opening import DraftKnowledge, open_drafting
from hetero_ee.speculation.sources import draft_head_opening
from hetero_ee.speculation.sources.draft_head_layer import DraftHead
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import random_weights
from hetero_ee_profiles.gpu.platform import GpuPlatform, cuda_platform
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info
from hetero_ee_profiles.host.process import physical_core_count
from hetero_ee_profiles.machine import this_machine
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.records import write_whole

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = "There is no GPU that torch can use: nothing was measured; --dry-run tries the benchmark out."
RATES = DraftRates("synthetic acceptance", (0.78,), 0.0)
LAYER_SHARES = (1.0, 0.75, 0.5, 0.25)  # fastest first
CONTEXT_TOKENS = 1024
N_LAUNCHES = 200
KERNEL_TESTS = "tests/gpu/interpreted"
LEFT_OUT = "left out: the minutes are over"
DRY_PRESET = Preset((1, 8, 17), ((1, 20),), 2, 2**16, 2**16, 0.0, 0.1, 0.0, 1.0)

Opening = Callable[[ModelSpec, ModelWeights, PlanRequest], Opened]


@dataclass(slots=True)
class Bench:
    """What is measured, and by when it has to be; and what was found. opening: makes a plan ready to run. file: of the
    figures. profile: once a GPU was measured."""

    spec: ModelSpec
    platform: GpuPlatform
    registry: Registry | None
    preset: Preset
    opening: Opening
    is_dry: bool
    end_s: float
    prompt_tokens: int = 512
    text_tokens: int = 48
    file: Path | None = None
    profile: HardwareProfile | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.end_s - time.perf_counter()

    @property
    def document(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        judged = {"goals": goals(self.figures), "failures": failures(self.figures)}
        return {"date": now, "is_dry_run": self.is_dry, **self.figures, **judged}

    def keep(self) -> None:
        """So that what hangs later, or is killed, takes nothing along."""
        if self.file is not None:
            write_whole(json.dumps(self.document, indent=1), self.file)

    def part(self, name: str, measure: "Callable[[Bench], Any]") -> None:
        """Its figures, or why there are none: one part that fails leaves the others as they are."""
        start_s = time.perf_counter()
        try:
            if self.left_s <= 0:
                raise TimeoutError(LEFT_OUT)
            self.figures[name] = measure(self)
        except Exception as error:  # whatever a driver or a kernel raises is this part's result
            self.figures[name] = {"failed": in_a_line(error)}
        self.keep()
        say(f"{name}: {time.perf_counter() - start_s:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all figures are written")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--model", default="llama-2-7b", help="one whose shapes are known")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    use_kernel_cache(cache_folder())
    end_s = time.perf_counter() + 60 * arguments.minutes
    bench = dry_bench(end_s) if arguments.dry_run else gpu_bench(arguments.model, end_s)
    bench.file = arguments.json
    bench.keep()  # a file that can't be written shows now
    for name, measure in PARTS.items():
        bench.part(name, measure)
    document = bench.document
    print("\n".join(markdown(document)))
    return 1 if document["failures"] else 0


def gpu_bench(model: str, end_s: float) -> Bench:
    platform = cuda_platform(None)
    assert platform is not None, "there is a GPU"
    threads = physical_core_count()

    def opening(spec: ModelSpec, weights: ModelWeights, placement: PlanRequest) -> Opened:
        return open_planned(spec, weights, placement, threads, time.perf_counter, say)

    return Bench(known_spec(model), platform, None, replace(FULL, cpu_budget_s=45.0), opening, False, end_s)


def dry_bench(end_s: float) -> Bench:
    """A tiny model behind the stand-ins of the tests."""
    from hetero_ee.hub.config_file import read_spec

    sys.path.insert(0, str(ROOT))
    from tests.families import config_of
    from tests.stand_in_gpu import StandInGpu
    from tests.stand_in_machine import on_stand_in

    def opening(spec: ModelSpec, weights: ModelWeights, placement: PlanRequest) -> Opened:
        assert placement.plan is not None, "each row has its plan"
        return Opened(on_stand_in(spec, weights, placement.plan), time.perf_counter, placement.plan, request=placement)

    spec = read_spec(config_of("llama", num_hidden_layers=4, max_position_embeddings=2048))
    torch_alone = Registry(lambda package: package == "torch")
    return Bench(spec, StandInGpu(driver_bytes=3 * 2**29), torch_alone, DRY_PRESET, opening, True, end_s, 40, 8)


def kernels(bench: Bench) -> dict[str, Any]:
    """The kernels' tests: on the card, in a dry run one file in Triton's interpreter."""
    tests = f"{KERNEL_TESTS}/test_quantize.py" if bench.is_dry else KERNEL_TESTS
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if bench.is_dry else {})
    command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "--no-header", "--tb=line", tests]
    limit_s = bench.left_s / 4
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as cut_off:
        printed: Any = cut_off.stdout or b""  # bytes, whatever was asked for
        lines = printed.decode(errors="replace").splitlines()
        n_passed, failed = (sum(f" {word}" in line for line in lines) for word in ("PASSED", "FAILED"))
        said = f"cut off after {limit_s:.0f} s: {n_passed} passed and {failed} failed by then"
        return {"passed": False, "said": [said], "failures": [x for x in lines if " FAILED" in x]}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return {
        "passed": done.returncode == 0,
        "said": lines[-1:],
        "failures": [x for x in lines if x.startswith("FAILED")],
    }


def machine(bench: Bench) -> dict[str, Any]:
    """A profile as the product measures it, with more thread counts; what the tables show of it."""
    n_cores = physical_core_count()
    threads = [1] if bench.is_dry else sorted({1, *(2**n for n in range(n_cores.bit_length())), n_cores})
    origin = Origin("tests/bench/bench_gpu.py", datetime.now(UTC).date().isoformat(), versions())
    host = this_host()
    about, free_bytes = this_machine(host, versions()), memory_info(host).available_bytes
    subject = Subject(about, free_bytes, None, time.perf_counter, bench.platform, registry=bench.registry)
    profile = measure_profile(bench.spec, subject, origin, threads=threads, preset=bench.preset, progress=None)
    found = {
        "card": {"card": "a stand-in"} if bench.is_dry else card(),
        "cpu": [
            {"threads": t.threads, "read_gb_s": t.read_bytes_per_s.value / 1e9}
            | {"products": products(t, t.read_bytes_per_s.value)}
            for t in profile.cpu
        ],
        "warnings": list(profile.warnings),
    }
    if profile.gpu is None or profile.link is None:
        return found
    bench.profile = profile
    return found | {
        "copy_gb_s": profile.gpu.read_bytes_per_s.value / 1e9,
        "products": products(profile.gpu, profile.gpu.read_bytes_per_s.value),
        "attentions": [[a.m, a.context_tokens, a.time.value] for a in profile.gpu.attentions],
        "overheads": [[row.m, row.layer.value, row.whole_pass.value] for row in profile.gpu.overheads],
        "link": {name: getattr(profile.link, name).value for name in profile.link.__slots__},
    }


def launches(bench: Bench) -> dict[str, float]:
    """Microseconds of the host and of the GPU for one launch among many, without a graph and with one."""
    platform = bench.platform
    with platform.current():
        x = platform.allocate((256,), torch.float32)

        def many() -> None:
            for _ in range(N_LAUNCHES):
                platform.launch(x)

        many()
        platform.synchronize()
        start_s = time.perf_counter()
        many()
        handed_s = time.perf_counter() - start_s
        replay = platform.recorded(many)
        alone_s, recorded_s = median(platform.seconds(many, 5)), median(platform.seconds(replay, 5))
    found = {"host": handed_s, "gpu_without_graph": alone_s, "gpu_in_graph": recorded_s}
    return {name: seconds / N_LAUNCHES * 1e6 for name, seconds in found.items()}


def plans(bench: Bench) -> list[dict[str, Any]]:
    """A row for each share of the layers."""
    profile, spec = bench.profile, bench.spec
    if profile is None:
        raise RuntimeError("no GPU was measured to plan for")
    weights = random_weights(spec)
    rows = bench.figures["plans"] = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, quantizing_once():
        write_synthetic_head(Path(folder), spec, RATES, None)
        knowledge = DraftKnowledge(draft_head=Path(folder), is_asked=True)
        for share in LAYER_SHARES:
            rows.append({"layer_share": share} | plan_row(bench, profile, weights, knowledge, share))
            texts = [row["text"] for row in rows if "text" in row]
            if "text" in rows[-1]:
                rows[-1]["as_first_row"] = agreeing_tokens(texts[0], texts[-1])
            bench.keep()
    return rows


@contextmanager
def quantizing_once() -> Iterator[None]:
    """All rows draft with one head, and quantizing that of a 7B model takes a core some 15 s."""
    quantize, kept = draft_head_opening.head_weights, list[ModelWeights]()

    def once(head: DraftHead, *, compiled: bool) -> ModelWeights:
        if not kept:
            kept.append(quantize(head, compiled=compiled))
        return kept[0]

    with mock.patch.object(draft_head_opening, "head_weights", once):
        yield


def plan_row(
    bench: Bench, profile: HardwareProfile, weights: ModelWeights, knowledge: DraftKnowledge, share: float
) -> dict[str, Any]:
    """Full mode, a prompt, and exact mode by one placement; tokens a second. A mode that fails leaves the other."""
    spec, threads = bench.spec, profile.cpu[-1].threads
    n_gpu = max(1, round(share * spec.n_layers))
    limits = Limits(context_tokens=CONTEXT_TOKENS, kv_type="fp16", gpu_layers=n_gpu, threads=threads)
    row: dict[str, Any] = {"gpu_layers": n_gpu, "failed": {}, "replanned": []}
    for mode, measure in (("full", full_figures), ("exact", exact_figures)):
        try:
            if bench.left_s <= 0:
                raise TimeoutError(LEFT_OUT)
            known = knowledge.statistics(spec, profile, threads)
            in_mode = replace(limits, mode=mode)
            made = make_plan(spec, profile, in_mode, known)
            opened = bench.opening(spec, weights, PlanRequest(profile, in_mode, made, known))
            try:
                row |= measure(bench, profile, knowledge, known, opened)
                if opened.executor.plan is not made:  # memory was short: what was predicted is not what ran
                    row["replanned"].append(mode)
            finally:
                opened.executor.close()
        except Exception as error:  # as in Bench.part
            row["failed"][mode] = in_a_line(error)
    return row


def full_figures(
    bench: Bench, profile: HardwareProfile, knowledge: DraftKnowledge, known: Statistics, opened: Opened
) -> dict[str, Any]:
    """A prompt, and a text behind none."""
    executor, made, n_prompt, n_text = opened.executor, opened.plan, bench.prompt_tokens, bench.text_tokens
    measured = partial(TimedBench(executor, 2, opened.clock).run, chunk_tokens=made.prefill_chunk_tokens)
    found = {}
    for name, tokens in (("prompt", (n_prompt, 0)), ("full", (0, n_text))):
        expected_s = predicted_run_s(bench.spec, profile, made, *tokens, 0, None)
        found[name] = achieved(sum(tokens), expected_s, measured(*tokens, 0).samples_s)
    return found


def exact_figures(
    bench: Bench, profile: HardwareProfile, knowledge: DraftKnowledge, known: Statistics, opened: Opened
) -> dict[str, Any]:
    """A text with synthetic acceptance, which must be the text of full mode."""
    executor, clock, spec, n_text = opened.executor, opened.clock, bench.spec, bench.text_tokens
    timing, counts = TimedBench(executor, 2, clock), DraftCounts()
    text = timing.text(n_text + 1)
    mode = partial(ExactMode, executor, drafting(knowledge, opened, profile, text, spec), counts, clock)
    params, ending = SamplingParams(max_new_tokens=n_text + 1), Ending(frozenset(), executor.cache.max_tokens)
    tokens = list(generate(executor, [text[:1]], params, ending, lambda _: "", clock, mode()))
    run = timing.text_run(mode, mode, n_text, 0)
    expected_s = predicted_text_s(spec, profile, opened.plan, known, n_text, 0)
    return {
        "exact": achieved(n_text, expected_s, run.samples_s),
        "tokens_per_pass": counts.statistics(spec.n_layers, 0).tokens_per_pass,
        "text": text,
        "same_text": [token.token_id for token in tokens] == text[1:],
    }


def drafting(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile, text: Sequence[int], spec: ModelSpec
) -> Drafting:
    """Of the head in `knowledge`, right as often as RATES say."""
    found = open_drafting(knowledge, opened, profile, say)
    assert found is not None, "exact mode drafts"
    return synthetic(found, text, RATES, spec.vocab_size)


def achieved(n_tokens: int, expected_s: float | None, samples_s: Sequence[float]) -> dict[str, Any]:
    rate = n_tokens / median(samples_s)
    expected = None if expected_s is None else n_tokens / expected_s
    return {"predicted": expected, "achieved": rate, "ratio": None if expected is None else rate / expected}


def libraries(bench: Bench) -> list[dict[str, Any]]:
    if bench.is_dry:
        return []
    return list(other_libraries((bench.spec.hidden_size, bench.spec.hidden_size), 5))


PARTS: dict[str, Callable[[Bench], Any]] = {
    "machine": machine,
    "kernels": kernels,
    "launches": launches,
    "plans": plans,
    "libraries": libraries,
}


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
