"""Published speeds of models split between a GPU and the CPU, and predictions by profiles derived from data sheets."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.known_shapes import PARAMETERS, known_shapes, known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MTP_HEAD
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import Part, model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.costs import Costs, part_work, split_work
from hetero_ee.speculation.opening import DraftKnowledge
from hetero_ee_profiles.data_sheets import DataSheet
from hetero_ee_profiles.reference import derived_profile
from hetero_ee_profiles.units import GIB

CONTEXT_TOKENS, KV_CONTEXT = 128, 4096  # for which text is predicted, and for which a KV cache leaves room
# Bits per weight of a GGUF file by kind of part, "" for all others. Q4_K_M keeps half of the value and down projections
# and the head in Q6_K, of 6.56 bits, and the rest in Q4_K, of 4.5. A matrix takes longer to read by as much as it has
# more bits than this engine's.
ENGINE: Mapping[str, float] = {"head": 8.5, "": 4.5}
Q4_K_M: Mapping[str, float] = {"head": 6.56, "": 4.8}
IQ4_XS: Mapping[str, float] = {"": 4.25}
# llmfit's benchmark of a llama.cpp server divides a reply's tokens by the time of the whole request. Its prompts have
# 20 to 40 tokens with their templates; a reply ends itself or has 300, which it doesn't publish: 200 are assumed.
REQUEST_TOKENS, REPLY_TOKENS = 32, 200
# Models split between a GPU and the CPU in Q4_K_M: layers on the GPU, None for the most that fit, and tokens per second
# of requests. Source: AlexsJones/llmfit, pull requests 773 to 778 and 787. Each machine's ratios are compared, as the
# RAM's bandwidth is the rated one, and llama.cpp's CPU kernels reach less of it than this engine's. With -ngl N or
# less, llama.cpp leaves the lm_head of a model of N layers on the CPU: a 14B model took 28.8 ms for a token with
# -ngl 48, and 14.0 ms with 49 (its issue 11752). What is left of the RTX 2080's times is the CPU's: 50 to 68 GB/s.
# The RTX 5070's split models have no published layers, so theirs are speeds that no split of whole layers exceeds.
OLD_PC = DataSheet(
    "Intel Core i9-10900X", 10, 4.3, 64, True, 64, 102.4, 3.5, "rtx-2080-8gb", "RTX 2080", 8, 448, 10.1, 15.8
)
NEW_PC = DataSheet(
    "Intel Core i9-13900HK", 6, 4.0, 32, True, 31, 83.2, 3.5, "rtx-5070-12gb", "RTX 5070", 12, 672, 30.9, 31.5
)
LAPTOP_8GB = DataSheet(
    "AMD Ryzen 7 260", 8, 4.0, 32, True, 32, 89.6, 3.5, "rtx-5060-laptop-8gb", "RTX 5060 Laptop", 8, 384, 16.6, 15.8
)
LAPTOP_12GB = DataSheet(
    "not named", 8, 4.5, 32, True, 64, 89.6, 3.5, "rtx-pro-3000-laptop-12gb", "RTX PRO 3000 Laptop", 12, 672, 26.0, 31.5
)
SPLITS: tuple[tuple[DataSheet, str, int | None, float], ...] = (
    (OLD_PC, "gemma-3-12b", 44, 26.1),
    (OLD_PC, "gemma-2-9b", 36, 23.7),
    (OLD_PC, "qwen2.5-14b", 42, 20.8),
    (OLD_PC, "qwen3-14b", 32, 16.9),
    (OLD_PC, "phi-4", 32, 16.7),
    (OLD_PC, "mistral-small-24b", 16, 5.2),
    (OLD_PC, "qwen3-4b", 99, 110.6),
    (OLD_PC, "llama-3.1-8b", 99, 71.9),
    (OLD_PC, "qwen3-8b", 99, 69.3),
    (NEW_PC, "llama-3.1-8b", None, 105),
    (NEW_PC, "qwen3-14b", None, 59.0),
    (NEW_PC, "mistral-small-24b", None, 7.6),
    (NEW_PC, "gemma-3-27b", None, 4.8),
    (NEW_PC, "qwen3-32b", None, 4.4),
    # Qwen3.8-27B, of these shapes, in IQ4_XS. Source: qwen38-mtp. The laptops' RAM is not named; that of the first CPU.
    (LAPTOP_8GB, "qwen3.6-27b", 25, 4.2),
    (LAPTOP_12GB, "qwen3.6-27b", 38, 5.3),
)
# The last two with drafts of two tokens by their MTP layer: acceptance of a draft, and tokens per second.
DRAFTED = ((LAPTOP_8GB, 0.90, 7.3), (LAPTOP_12GB, 0.85, 10.8))


def splits() -> Iterator[str]:
    """Yield a table of split models: published and predicted speeds, and their ratio."""
    yield f"\n| machine | model | layers on the GPU | published t/s | predicted | ratio |\n{'|---' * 6}|"
    for sheet, model, gpu_layers, tokens_per_s in SPLITS:
        found, n_layers = split_speed(sheet, model, gpu_layers), known_spec(model).n_layers
        layers = f"{most_layers(known_spec(model), sheet)} at most" if gpu_layers is None else min(gpu_layers, n_layers)
        yield (
            f"| {sheet.name} | {model} | {layers} of {n_layers} | {tokens_per_s:g} | {found:.1f} "
            f"| {found / tokens_per_s:.2f} |"
        )


def split_speed(sheet: DataSheet, model: str, gpu_layers: int | None) -> float:
    """Return a split model's predicted tokens per second, as its source counts them."""
    spec, is_laptop = known_spec(model), sheet in (LAPTOP_8GB, LAPTOP_12GB)
    made = partial(split, spec, sheet, most_layers(spec, sheet) if gpu_layers is None else gpu_layers)
    text = stored_speed(made(), Costs(spec, derived_profile(sheet, "")), IQ4_XS if is_laptop else Q4_K_M)
    if is_laptop:
        return text
    return request_speed(1 / text, REQUEST_TOKENS / made(at_tokens=REQUEST_TOKENS).prediction.prompt_tokens_per_s)


def split(spec: ModelSpec, sheet: DataSheet, gpu_layers: int, drafts: Statistics | None = None, **more: Any) -> Plan:
    """Return a plan with gpu_layers layers on the GPU, by llama.cpp's rules."""
    at_tokens = more.pop("at_tokens", CONTEXT_TOKENS)
    chosen: dict[str, Any] = {"mode": "full", "kv_type": "fp16", "context_tokens": 2048, "vram_margin_bytes": 0} | more
    chosen |= {"gpu_layers": min(gpu_layers, spec.n_layers)}
    chosen |= {"overrides": (("head", "cpu"),) if gpu_layers <= spec.n_layers else ()}
    profile = derived_profile(sheet, "")
    return plan(spec, profile, Limits(**chosen), drafts or Statistics(), predict_at_tokens=at_tokens)


def most_layers(spec: ModelSpec, sheet: DataSheet) -> int:
    """Return the -ngl of the most layers whose weights and KV cache leave llama.cpp's margin of 1 GiB free."""
    parts, gpu = model_parts(spec, "fp16"), derived_profile(sheet, "").gpu
    assert gpu is not None
    sizes = [0.0] * (spec.n_layers + 1)
    for part in parts[1:]:
        number = spec.n_layers if part.layer is None else part.layer
        weights = sum(product.n_bytes for product in part.cost.products)
        sizes[number] += weights * more_bits(part.label, Q4_K_M) + part.cost.state_bytes(KV_CONTEXT)
    return sum(total <= gpu.free_bytes - GIB for total in accumulate(sizes))


def more_bits(kind: str, bits: Mapping[str, float]) -> float:
    """Return how many times the bits of this engine a kind of part has."""
    return bits.get(kind, bits[""]) / ENGINE.get(kind, ENGINE[""])


def stored_speed(found: Plan, costs: Costs, bits: Mapping[str, float]) -> float:
    """Return a plan's tokens per second in text if its weights had these bits."""
    parts = model_parts(costs.spec, "fp16")
    more_s = sum(
        products_s(costs, part, placement) * (more_bits(part.label, bits) - 1)
        for part, placement in zip(parts, found.decode_placements, strict=True)
    )
    return 1 / (1 / found.prediction.generated_tokens_per_s + more_s)


def products_s(costs: Costs, part: Part, placement: Placement) -> float:
    """Return the seconds of a token's products in a part, which read its weights."""
    gpu = costs.profile.gpu
    assert gpu is not None
    if not placement.is_split:
        return part_work(costs.spec, part, 1).products_s(gpu if placement.on_gpu else costs.cpu)
    work = split_work(costs.spec, part, placement, 1)
    return work.first.products_s(gpu) + max(work.hot.products_s(gpu), work.cold.products_s(costs.cpu))


def request_speed(text_s: float, prompt_s: float) -> float:
    """Return a reply's tokens per second of the whole request."""
    return REPLY_TOKENS / (prompt_s + REPLY_TOKENS * text_s)


def drafted() -> Iterator[str]:
    """Yield a table of how many times as fast an MTP layer makes a split model, published and predicted."""
    yield f"\n| machine | with an MTP layer, times as fast, published | predicted |\n{'|---' * 3}|"
    for sheet, acceptance, tokens_per_s in DRAFTED:
        model, gpu_layers, plain = next(row[1:] for row in SPLITS if row[0] is sheet)
        fields = known_shapes()[model] | {"mtp_num_hidden_layers": 1}
        spec = spec_from_hf({name: value for name, value in fields.items() if name != PARAMETERS}, model)
        knowledge = DraftKnowledge(draft_head=MTP_HEAD, acceptance=(acceptance,))
        drafts = knowledge.statistics(spec, derived_profile(sheet, ""), sheet.n_cores)
        plans = split(spec, sheet, gpu_layers), split(spec, sheet, gpu_layers, drafts, mode="exact", draft_length=3)
        before, after = (made.prediction.generated_tokens_per_s for made in plans)
        yield f"| {sheet.name} | {tokens_per_s / plain:.2f} | {after / before:.2f} |"
