"""Published speeds of mixtures of experts by settings of one machine, and the predictions for them.

Each machine's ratios are compared: speeds depend on the engine, and on RAM that most sources don't name. All are of
llama.cpp, which reads prompts otherwise than this engine: it copies the experts that a chunk uses to the GPU and then
computes; this engine's CPU computes some layers while others are copied whole. So prompts are predicted for both, for
this engine with experts where its planner puts them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import Part, model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.times.costs import Costs
from hetero_ee_profiles.data_sheets import DataSheet
from hetero_ee_profiles.reference import derived_profile
from scripts.published_splits import (
    CONTEXT_TOKENS,
    OLD_PC,
    Q4_K_M,
    REQUEST_TOKENS,
    more_bits,
    products_s,
    request_speed,
    stored_speed,
)

# The RAM's rate is published for the first, and assumed for the others, as is the CPU where it says so.
PC_5080 = DataSheet("AMD Ryzen 9 9950X", 16, 4.7, 64, True, 128, 76.8, 7.0, "rtx-5080", "RTX 5080", 16, 960, 56.3, 63.0)
PC_5070 = DataSheet(
    "AMD Ryzen 7 9800X3D", 8, 4.9, 64, True, 64, 96.0, 7.0, "rtx-5070-ti", "RTX 5070 Ti", 16, 896, 43.9, 63.0
)
PC_5060 = DataSheet("assumed", 8, 4.5, 32, True, 64, 89.6, 7.0, "rtx-5060-ti", "RTX 5060 Ti", 16, 448, 23.7, 31.5)
PC_3060 = DataSheet("assumed", 6, 4.2, 32, False, 64, 51.2, 3.5, "rtx-3060", "RTX 3060", 12, 360, 12.7, 31.5)
PC_3090 = DataSheet("assumed", 8, 4.5, 32, True, 128, 89.6, 7.0, "rtx-3090", "RTX 3090", 24, 936, 35.6, 31.5)
PC_1060 = DataSheet("Intel Core i3-8100", 4, 3.6, 32, False, 24, 38.4, 0.5, "gtx-1060", "GTX 1060", 6, 192, 4.4, 15.8)
QWEN_35B, GPT_OSS_120B, DEEPSEEK = "qwen3.6-35b-a3b", "gpt-oss-120b", "deepseek-coder-v2-lite"
NEMOTRON = "nemotron-3-nano-30b-a3b"
DEEPSEEK_FIELDS = {  # of its published config.json
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
NEMOTRON_FIELDS = {  # of its published config.json
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "tie_word_embeddings": False,
}
FIELDS = {DEEPSEEK: DEEPSEEK_FIELDS, NEMOTRON: NEMOTRON_FIELDS}  # of models without a known shape
RATIO_GOAL = 0.15  # of the ratio of a setting's speed to the first setting's
Q8_0: Mapping[str, float] = {"": 8.5}
Q4_0: Mapping[str, float] = {"head": 8.5, "": 4.5}  # of 2,688 columns, which Q6_K's blocks of 256 don't divide
Q5_K: Mapping[str, float] = {"head": 6.56, "": 5.6}  # Q5_K_XL: 25 GB for 35.95 billion weights
# Q4_K's blocks of 256 don't divide DeepSeek's 1,408 columns: Q8_0 and Q5_0 take their place in down projections.
Q4_K_M_1408: Mapping[str, float] = {"head": 6.56, "moe": 5.33, "": 4.8}
MXFP4_Q8: Mapping[str, float] = {"moe": 4.25, "": 8.5}  # gpt-oss's files: experts in MXFP4, the rest in Q8_0 or F16
MXFP4_F16: Mapping[str, float] = {"moe": 4.25, "": 16.0}
STREAMED_TOKENS = 32  # chunks of as many or more are computed by llama.cpp's GPU
# A chunk of m tokens chooses as many experts as m to this power would, if independent: 512 tokens of code used 65 % of
# gpt-oss-120b's (mean of eight layers printed in llama.cpp's pull request 15346), where independent ones use all.
ADJACENT = 0.56
HARMONY_TOKENS = 65  # of the system message that gpt-oss's chat template adds to each prompt


@dataclass(frozen=True, slots=True)
class Setting:
    """Limits of a plan in a user's words, and the tokens per second that they published."""

    words: str
    limits: Mapping[str, Any]
    tokens_per_s: float
    model: str = ""  # if it is not that of all settings
    bits: Mapping[str, float] = field(default_factory=lambda: Q4_K_M)
    gpu_share: float = 0.0  # of each layer's experts, if GPU and CPU compute one after the other
    prompt_tokens: int = 0  # of a request, or of the prompt whose speed is published
    is_held: bool = True  # to the goal; otherwise the ratio is only printed


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one model on one machine."""

    sheet: DataSheet
    model: str
    what: str  # "text", "prompt", or "request" for text with its prompt
    settings: tuple[Setting, ...]
    source: str
    knows_ram: bool = False  # so that speeds count as well
    context_tokens: int = 4096


def on_gpu(n_cpu_moe: int, **more: Any) -> dict[str, Any]:
    return {"gpu_layers": 1000, "n_cpu_moe": n_cpu_moe} | more


def hot(n_sections: int) -> dict[str, Any]:
    return {"overrides": ((".*moe", f"hot-{n_sections}"), (".*", "gpu"))}


NGL_32 = {"gpu_layers": 32, "overrides": (("head", "cpu"),)}  # as llama.cpp places 32 layers of 40
CACHED = "thecodacus/llama.cpp pull request 5"
UBATCH = (
    (256, 25, 240, 33.1),
    (512, 26, 380, 32.3),
    (2048, 25, 1113, 33.0),
    (4096, 26, 1682, 32.4),
    (8192, 28, 2091, 30.1),
)
EXPERTS = (
    Settings(
        PC_5080,
        QWEN_35B,
        "text",
        (
            Setting("all experts on the CPU", on_gpu(40), 51.0),
            Setting("-ncmoe 24", on_gpu(24), 69.6),
            Setting("Q8_0, all experts on the CPU", on_gpu(40), 35.7, bits=Q8_0),
        ),
        "r/LocalLLaMA 1rei65v",
        knows_ram=True,
    ),
    Settings(
        PC_5070,
        QWEN_35B,
        "text",
        (Setting("all experts on the CPU", on_gpu(40), 51), Setting("-ncmoe 20", on_gpu(20), 79)),
        "setupai",
    ),
    Settings(
        PC_5060,
        QWEN_35B,
        "text",
        (Setting("-ncmoe 14", on_gpu(14), 52), Setting("Q5_K_XL -ncmoe 20", on_gpu(20), 42, bits=Q5_K)),
        "ik_llama.cpp pull request 1593, stock",
    ),
    Settings(
        PC_5060,
        QWEN_35B,
        "text",
        (
            Setting("-ncmoe 14", on_gpu(14), 62.3),
            Setting("Q5_K_XL -ncmoe 18", on_gpu(18), 49.9, bits=Q5_K),
            # "~45", of the first version of a port of llama.cpp's Mamba-2 to ik_llama.cpp
            Setting("Q4_0 -ncmoe 30", on_gpu(30), 45, NEMOTRON, Q4_0, is_held=False),
        ),
        "ik_llama.cpp pull request 1593",
    ),
    Settings(
        PC_3060,
        QWEN_35B,
        "text",
        (
            Setting("all experts on the CPU", on_gpu(40), 42.3),
            Setting("124 of 256 experts", hot(15), 51.3, gpu_share=124 / 256),
        ),
        CACHED,
    ),
    Settings(
        PC_3060,
        "glm-4.7-flash",
        "text",
        (
            Setting("all experts on the CPU", on_gpu(47), 32.1),
            Setting("40 of 64 experts", hot(20), 46.3, gpu_share=40 / 64),
        ),
        CACHED,
    ),
    Settings(
        PC_1060,
        QWEN_35B,
        "text",
        (Setting("all experts on the CPU", on_gpu(40), 13.5), Setting("-ncmoe 35", on_gpu(35), 17)),
        "frankcasanova.net, --no-mmap",
    ),
    Settings(
        OLD_PC,
        "qwen3-30b-a3b",
        "request",
        (
            Setting("-ncmoe 36", on_gpu(36), 33.7),
            Setting(
                "-ncmoe 12", on_gpu(12), 36.4, "gpt-oss-20b", MXFP4_Q8, prompt_tokens=REQUEST_TOKENS + HARMONY_TOKENS
            ),
            Setting("-ncmoe 16", on_gpu(16), 49.6, DEEPSEEK, Q4_K_M_1408),
            Setting("-ngl 32", NGL_32, 16.9, "qwen3-14b"),
        ),
        "AlexsJones/llmfit pull requests 755 and 773 to 778",
    ),
    Settings(
        PC_3090,
        GPT_OSS_120B,
        "text",
        tuple(Setting(f"-ncmoe {n}", on_gpu(n), tokens_per_s, bits=MXFP4_F16) for _, n, _, tokens_per_s in UBATCH),
        "r/LocalLLaMA",
    ),
    Settings(
        PC_3090,
        GPT_OSS_120B,
        "prompt",
        tuple(
            Setting(f"-ncmoe {n} -ub {m}", on_gpu(n, chunk_tokens=m), t, bits=MXFP4_F16, prompt_tokens=max(4096, m))
            for m, n, t, _ in UBATCH
        ),
        "r/LocalLLaMA",
        context_tokens=16384,
    ),
)
NOT_COMPARED = (
    "RTX 5080 with --fit, RTX 5060 Ti with ollama: the layers on the GPU are not published.",
    "RTX 3060: neither the acceptance of MTP's drafts nor the chunk of prompts is published.",
    "GTX 1060: 20 layers with experts exceed its 6 GB, so the driver pages; with mmap, pages come from a disk.",
    "GTX 1060, from -ncmoe 41 to 35: a seventh fewer experts on the CPU explain 1.14 at the most.",
    "RTX 2080: predicted speeds are 27 to 44 % too high; reading RAM at half of the rated 102 GB/s would explain most.",
    "RTX 5060 Ti, RTX 3060, GTX 1060: the RAM is assumed, so speeds say little.",
)


def predicted_settings(row: Settings) -> list[float]:
    """Return the predicted tokens per second of each setting, in llama.cpp's way."""
    return [_predicted_setting(row, setting) for setting in row.settings]


def spec_of(model: str) -> ModelSpec:
    return spec_from_hf(FIELDS[model], model) if model in FIELDS else known_spec(model)


def planned(row: Settings, setting: Setting, at_tokens: int) -> Plan:
    """Return this engine's plan in a setting."""
    every: dict[str, Any] = {"mode": "full", "kv_type": "fp16", "vram_margin_bytes": 0, **setting.limits}
    limits = Limits(context_tokens=row.context_tokens, **every)
    return plan(
        spec_of(setting.model or row.model), derived_profile(row.sheet, ""), limits, predict_at_tokens=at_tokens
    )


def _predicted_setting(row: Settings, setting: Setting) -> float:
    costs = Costs(spec_of(setting.model or row.model), derived_profile(row.sheet, ""))
    if row.what == "prompt":
        return setting.prompt_tokens / llama_prompt_s(costs, setting, setting.prompt_tokens)
    made = planned(row, setting, CONTEXT_TOKENS)
    text_s = 1 / stored_speed(made, costs, setting.bits)
    if setting.gpu_share:
        experts = [part for part in model_parts(costs.spec, "fp16") if part.has_experts]
        text_s += setting.gpu_share * sum(products_s(costs, part, Placement.GPU) for part in experts)
    if row.what == "text":
        return 1 / text_s
    n_tokens = setting.prompt_tokens or REQUEST_TOKENS
    if "n_cpu_moe" in setting.limits:
        return request_speed(text_s, llama_prompt_s(costs, setting, n_tokens))
    return request_speed(text_s, n_tokens / planned(row, setting, n_tokens).prediction.prompt_tokens_per_s)


def llama_prompt_s(costs: Costs, setting: Setting, n_tokens: int) -> float:
    """Return the seconds in which llama.cpp reads a prompt, if only experts of the first layers are not on the GPU."""
    chunk, n_cpu_moe = setting.limits.get("chunk_tokens", 512), setting.limits["n_cpu_moe"]
    independent = tuple(m**ADJACENT for m in range(1, chunk + 1))
    costs = Costs(replace(costs.spec, independent_tokens=independent), costs.profile)
    seconds = 0.0
    for first in range(0, n_tokens, chunk):
        m = min(chunk, n_tokens - first)
        for part in model_parts(costs.spec, "fp16")[1:-1]:
            assert part.layer is not None
            copies = part.has_experts and part.layer < n_cpu_moe and m >= STREAMED_TOKENS
            seconds += costs.part_s(part, Placement.GPU, m, first + m)
            seconds += _copied_s(costs, part, m) * more_bits(part.label, setting.bits) if copies else 0.0
    return seconds


def _copied_s(costs: Costs, part: Part, m: int) -> float:
    """Return the seconds of reading the routes and copying the experts that m tokens use, neighbours together."""
    link, units = costs.profile.link, part.cost.units
    assert link is not None and units is not None
    n_bytes = units.read_bytes(units.shares, m)
    share = n_bytes / units.n_bytes
    n_runs = len(units.products) * (share + (units.n_units - 1) * share * (1 - share))
    return link.synchronize.value + n_runs * link.latency.value + n_bytes / link.to_gpu_bytes_per_s.value


def misses(row: Settings, speeds: list[float]) -> Iterator[str]:
    """Yield the settings whose ratio to the first one is off by more than RATIO_GOAL."""
    for setting, found in zip(row.settings, speeds, strict=True):
        ratio, published = found / speeds[0], setting.tokens_per_s / row.settings[0].tokens_per_s
        if setting.is_held and abs(ratio / published - 1) > RATIO_GOAL:
            words = f"{setting.model or row.model} on {row.sheet.name} with {setting.words}"
            yield f"{words} has {ratio:.2f}, not {published:.2f}"


def experts() -> tuple[list[str], list[str]]:
    """Return the lines of a table, with each ratio to the first setting's speed, and the goals that are missed."""
    lines, missed = (
        [f"\n| machine | model | setting | published t/s | predicted | ratio | predicted |\n{'|---' * 7}|"],
        [],
    )
    for row in EXPERTS:
        speeds, first = predicted_settings(row), row.settings[0].tokens_per_s
        missed += misses(row, speeds)
        for setting, found in zip(row.settings, speeds, strict=True):
            own = ""
            if row.what == "prompt":  # without experts pinned
                free = replace(setting, limits={"chunk_tokens": setting.limits["chunk_tokens"]})
                made = planned(row, free, setting.prompt_tokens).prediction
                own = f", this engine {made.prompt_tokens_per_s:.0f}"
            lines.append(
                f"| {row.sheet.name} | {setting.model or row.model}, {row.what} | {setting.words} "
                f"| {setting.tokens_per_s:g} | {found:.1f}{own} "
                f"| {setting.tokens_per_s / first:.2f} | {found / speeds[0]:.2f} |"
            )
    return [*lines, "Not compared:", *NOT_COMPARED], missed
