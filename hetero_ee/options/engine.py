"""Options that say how a model is opened and where it may run, each stated once.

`EngineOptions` in planning/request.py adds those whose types are not light enough to import here.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypedDict

from hetero_ee.options.option import Option, options_of

AUTO, OFF = "auto", "off"  # values of the setting `profile`
QUANTIZERS = ("codebook", "search", "rtn", "nf4", "none")
KV_TYPES = ("fp32", "fp16", "int8")
CERTIFIED = "certified"
# Modes in which a token may leave before the last layer, unverified, each named by its policy. Never chosen by default.
EARLY_EXIT_MODES = ("specee", CERTIFIED, "calm", "skipdecode", "q-exit", "patience", "joint-gate")
MODES = ("full", "exact", *EARLY_EXIT_MODES)
RISK = 0.05  # of mode certified
MAX_DRAFT_LENGTH = 16
MAX_CONTEXT_TOKENS, MAX_THREADS = 2**24, 1024
MAX_GIB = 2**20
VRAM_MARGIN_GIB = 1.0


class ModelKeywords(TypedDict, total=False):
    """Keywords that say which weights are opened, and how the CPU runs them."""

    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hugging Face id.", flags=("--revision",))]
    offline: Annotated[
        bool,
        Option(
            help="Download nothing; use what is in the cache.",
            default=False,
            default_text="false",
            flags=("--offline",),
            setting="offline",
        ),
    ]
    quantizer: Annotated[
        str | None,
        Option(
            help="codebook, search, rtn or nf4 (int4, converted once), or none (fp32).",
            default_text="the checkpoint's own bits, else codebook",
            choices=QUANTIZERS,
            flags=("--quantizer",),
            setting="quantizer",
        ),
    ]
    sparsity: Annotated[
        str | float | None,
        Option(
            help="exact: skip FFN neurons that are 0 (ReLU); predicted: by a calibrated guess, without their gate; a "
            "number: that share of them; auto: as calibrated.",
            default_text="none",
            typed=str,
            flags=("--sparsity",),
        ),
    ]
    context_tokens: Annotated[
        int,
        Option(
            help="Longest prompt and text, in tokens; 0 is chosen to fit and grows when a text needs it, up to the "
            "model's own.",
            default=0,
            least=0,
            most=MAX_CONTEXT_TOKENS,
            flags=("-c", "--ctx-size"),
            setting="ctx_size",
        ),
    ]
    threads: Annotated[
        int,
        Option(
            help="CPU threads; 0 uses every physical core.",
            default=0,
            least=0,
            most=MAX_THREADS,
            flags=("-t", "--threads"),
            setting="threads",
        ),
    ]


class PlanKeywords(TypedDict, total=False):
    """Keywords that limit or pin a plan. None leaves the choice to the planner."""

    vram_budget: Annotated[
        float | None,
        Option(
            help="GPU memory to use, in GiB.",
            default_text="free memory, less the margin",
            least=0.0,
            most=MAX_GIB,
            unit="GiB",
            flags=("--vram-budget",),
        ),
    ]
    vram_margin: Annotated[
        float | None,
        Option(
            help="GPU memory to leave free, in GiB.",
            default_text=f"{VRAM_MARGIN_GIB:g}",
            least=0.0,
            most=MAX_GIB,
            unit="GiB",
            flags=("--vram-margin",),
        ),
    ]
    ram_budget: Annotated[
        float | None,
        Option(
            help="RAM to use, in GiB.",
            default_text="free memory",
            least=0.0,
            most=MAX_GIB,
            unit="GiB",
            flags=("--ram-budget",),
        ),
    ]
    gpu_layers: Annotated[
        int | None,
        Option(
            help="Layers placed whole on the GPU, counted from the first; more than the model has are all.",
            default_text=AUTO,
            least=0,
            typed=str,
            metavar="<int>|all|auto",
            flags=("-ngl", "--gpu-layers", "--n-gpu-layers"),
        ),
    ]
    override: Annotated[
        str | Sequence[str] | None,
        Option(
            help="Pin parts by name: REGEX=gpu, =cpu, =stream, or =hot-N of a sparse FFN; can be given more than once.",
            typed=list[str],
            flags=("-ot", "--override", "--override-tensor"),
        ),
    ]
    kv_type: Annotated[
        str | None,
        Option(
            help="Type of the KV cache: fp32, fp16 or int8.",
            default_text="fp16; fp32 with --quantizer none",
            choices=KV_TYPES,
            flags=("--kv-type",),
        ),
    ]
    mode: Annotated[
        str | None,
        Option(
            help="full: one token per pass; exact: speculative decoding by early exit (self-speculative), a draft head "
            "or n-grams, with the text of full mode; specee, certified, calm, skipdecode, q-exit, patience, "
            "joint-gate: tokens are given out at early exits, and texts differ.",
            default_text="full or exact, whichever should be faster",
            choices=MODES,
            flags=("--mode",),
        ),
    ]
    draft_length: Annotated[
        int | None,
        Option(
            help=f"Tokens verified in one pass in exact mode, or caught up in an early-exit mode, 1 to "
            f"{MAX_DRAFT_LENGTH}.",
            default_text="what should be fastest",
            least=1,
            most=MAX_DRAFT_LENGTH,
            flags=("--draft-length", "--draft-tokens"),
        ),
    ]
    risk: Annotated[
        float | None,
        Option(
            help="In mode certified, the share of a prompt's tokens that may differ.",
            default_text=f"{RISK:g}",
            flags=("--risk",),
        ),
    ]


class RunKeywords(TypedDict, total=False):
    """Keywords that say what runs a plan, and what is recorded."""

    draft_head: Annotated[
        str | Path | None,
        Option(
            help="An EAGLE draft head, 1 to 3.1: its folder, or a Hugging Face id.",
            default_text="the model's own, if any",
            typed=str,
            flags=("--draft-head",),
        ),
    ]
    emulate: Annotated[bool, Option(help="Run on the profile's machine, emulated here.")]
    traces: Annotated[bool, Option(help="Record what runs where and when.")]


MODEL = Option(
    name="model",
    help="Folder with a checkpoint, name from hetero-ee models, or Hugging Face id.",
    default_text="demo model",
    flags=("-m", "--model"),
    setting="model",
)
PROFILE = Option(
    name="profile",
    help="auto: plan by this machine's profile, measured for some seconds at a model's first start; off: don't plan, "
    "so that the CPU runs everything.",
    default=AUTO,
    choices=(AUTO, OFF),
    flags=("--profile",),
    setting="profile",
)
PLAN = Option(
    name="plan",
    help="Run this plan, as printed by plan --json, instead of making one.",
    typed=Path,
    flags=("--plan",),
)
LIMITS = Option(name="limits", help="The limits of a plan in one object.")
FOLDERS = (
    Option(
        name="cache_dir",
        kind=Path,
        help="Folder for converted models and compiled kernels.",
        default_text="the platform's cache folder",
        setting="cache_dir",
    ),
    Option(
        name="data_dir",
        kind=Path,
        help="Folder for measured profiles.",
        default_text="the platform's data folder",
        setting="data_dir",
    ),
)
MODEL_OPTIONS = options_of(ModelKeywords) | {PROFILE.name: PROFILE}
PLAN_OPTIONS = options_of(PlanKeywords)
RUN_OPTIONS = options_of(RunKeywords) | {PLAN.name: PLAN, LIMITS.name: LIMITS}
ENGINE_OPTIONS = MODEL_OPTIONS | PLAN_OPTIONS | RUN_OPTIONS
OVERRIDES = replace(PLAN_OPTIONS["override"], name="overrides")  # as Limits calls them
SETTINGS = {each.setting: each for each in (MODEL, *ENGINE_OPTIONS.values(), *FOLDERS) if each.setting}
