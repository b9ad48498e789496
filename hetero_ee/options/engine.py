"""Declare the options that decide how a model is opened and where it may run.

`EngineOptions` in planning/request.py adds options whose types are too heavy to import here.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypedDict

from hetero_ee.options.option import Option, Range, options_of

AUTO, OFF = "auto", "off"  # values of the setting `profile`
UNQUANTIZED = "none"
QUANTIZERS = ("codebook", "search", "rtn", "nf4", "int5", "int6", "int8", UNQUANTIZED)
KV_TYPES = ("fp32", "fp16", "int8")
ACTIVATION_TERMS = {"int8": 1, "int16": 2}  # int8 terms of each activation
CERTIFIED = "certified"
# Modes in which a token may leave before the last layer, unverified, each named by its policy. Never chosen by default.
EARLY_EXIT_MODES = ("specee", CERTIFIED, "calm", "skipdecode")
MODES = ("full", "exact", *EARLY_EXIT_MODES)
NO_HEAD, MTP_HEAD, MTP_WORDS = "none", "mtp", ("mtp", "draft-mtp")  # words for a draft head, one llama.cpp's
RISK = 0.05  # of mode certified
NO_SCHEDULE, OFFLINE, ONLINE, BOTH = SCHEDULES = ("none", "offline", "online", "both")  # of mode specee
MAX_DRAFT_LENGTH = 16
MAX_TREE_WIDTH = 8
MAX_CONTEXT_TOKENS, MAX_THREADS, MAX_LAYERS = 2**24, 1024, 1000
MAX_GIB = 2**20
N_SEQUENCES, MAX_SEQUENCES = 1, 65  # at most a server's, and one more
VRAM_MARGIN_GIB = 1.0
SNAPSHOT_GIB = 1.0


class ModelKeywords(TypedDict, total=False):
    """Keyword arguments that select the weights to open, and how the CPU runs them."""

    revision: Annotated[str | None, Option("Branch, tag or commit of a Hugging Face id.", ("--revision",))]
    offline: Annotated[
        bool,
        Option(
            "Download nothing; use what is in the cache.",
            ("--offline",),
            default=False,
            default_text="false",
            setting="offline",
        ),
    ]
    quantizer: Annotated[
        str | None,
        Option(
            "codebook, search, rtn or nf4 (int4), int5, int6 or int8, converted once, or none (fp32).",
            ("--quantizer",),
            default_text="the checkpoint's own bits, else codebook",
            choices=QUANTIZERS,
            setting="quantizer",
        ),
    ]
    sparsity: Annotated[
        str | float | None,
        Option(
            "exact: skip FFN neurons that are 0 (ReLU); predicted: by a calibrated guess, without their gate; a "
            "number: that share of them; auto: as calibrated.",
            ("--sparsity",),
            default_text="none",
            typed=str,
        ),
    ]
    activations: Annotated[
        str,
        Option(
            "Activations in products with quantized weights: int16 multiplies each as two int8 terms, but not those "
            "of sparse FFNs.",
            ("--activations",),
            default="int8",
            choices=tuple(ACTIVATION_TERMS),
            setting="activations",
        ),
    ]
    context_tokens: Annotated[
        int,
        Option(
            "Longest prompt and text, in tokens; 0 is chosen to fit and grows when a text needs it, up to the "
            "model's own.",
            ("-c", "--ctx-size"),
            default=0,
            setting="ctx_size",
        ),
        Range(0, MAX_CONTEXT_TOKENS),
    ]
    threads: Annotated[
        int,
        Option(
            "CPU threads; 0 uses the fastest measured number, else every physical core.",
            ("-t", "--threads"),
            default=0,
            setting="threads",
        ),
        Range(0, MAX_THREADS),
    ]


class PlanKeywords(TypedDict, total=False):
    """Keyword arguments that limit a plan or fix parts of it. None leaves the choice to the planner."""

    vram_budget: Annotated[
        float | None,
        Option("GPU memory to use, in GiB.", ("--vram-budget",), default_text="free memory, less the margin"),
        Range(0.0, MAX_GIB, "GiB"),
    ]
    vram_margin: Annotated[
        float | None,
        Option("GPU memory to leave free, in GiB.", ("--vram-margin",), default_text=f"{VRAM_MARGIN_GIB:g}"),
        Range(0.0, MAX_GIB, "GiB"),
    ]
    ram_budget: Annotated[
        float | None,
        Option("RAM to use, in GiB.", ("--ram-budget",), default_text="free memory"),
        Range(0.0, MAX_GIB, "GiB"),
    ]
    snapshot_budget: Annotated[
        float | None,
        Option(
            "RAM for copies of state at the ends of messages, in GiB: a chat continues from there when its text "
            "changes. Only models with recurrent layers or sliding windows use it.",
            ("--snapshot-budget",),
            default_text=f"{SNAPSHOT_GIB:g}",
        ),
        Range(0.0, MAX_GIB, "GiB"),
    ]
    gpu_layers: Annotated[
        int | None,
        Option(
            "Layers placed whole on the GPU, counted from the first; more than the model has are all.",
            ("-ngl", "--gpu-layers", "--n-gpu-layers"),
            default_text=AUTO,
            least=0,
            typed=str,
            metavar="<int>|all|auto",
        ),
    ]
    n_cpu_moe: Annotated[
        int | None,
        Option("First layers whose experts stay in RAM.", ("-ncmoe", "--n-cpu-moe"), default_text=AUTO),
        Range(0, MAX_LAYERS),
    ]
    cpu_moe: Annotated[
        bool | None, Option("Keep the experts of all layers in RAM.", ("-cmoe", "--cpu-moe"), default_text=AUTO)
    ]
    override: Annotated[
        str | Sequence[str] | None,
        Option(
            "Pin parts by name: REGEX=gpu, =cpu, =stream, or =hot-N of a sparse FFN or of experts; llama.cpp's names "
            "of tensors, as in exps=CPU, work too. Can be given more than once.",
            ("-ot", "--override", "--override-tensor"),
            typed=list[str],
        ),
    ]
    chunk_tokens: Annotated[
        int | None,
        Option("Tokens of a prompt per pass.", ("-ub", "--ubatch-size"), default_text="what should be fastest"),
        Range(1, MAX_CONTEXT_TOKENS),
    ]
    kv_type: Annotated[
        str | None,
        Option(
            "Type of the KV cache: fp32, fp16 or int8.",
            ("--kv-type",),
            default_text="fp16; fp32 with --quantizer none",
            choices=KV_TYPES,
        ),
    ]
    mode: Annotated[
        str | None,
        Option(
            "full: one token per pass; exact: speculative decoding by early exit (self-speculative), a draft head, a "
            "draft model or n-grams, with the text of full mode; specee, certified, calm, skipdecode: tokens are "
            "emitted at early exits, and texts differ.",
            ("--mode",),
            default_text="full or exact, whichever should be faster",
            choices=MODES,
        ),
    ]
    draft_length: Annotated[
        int | None,
        Option(
            f"Tokens verified in one pass in exact mode, or caught up in an early-exit mode, 1 to {MAX_DRAFT_LENGTH}.",
            ("--draft-length", "--draft-tokens"),
            default_text="what should be fastest",
        ),
        Range(1, MAX_DRAFT_LENGTH),
    ]
    draft_tree: Annotated[
        int | None,
        Option(
            f"Drafts of a draft head after the same token, 1 to {MAX_TREE_WIDTH}: 1 drafts chains, more draft trees.",
            ("--draft-tree",),
            default_text="what should be fastest",
        ),
        Range(1, MAX_TREE_WIDTH),
    ]
    risk: Annotated[
        float | None,
        Option(
            "In mode certified, the share of a prompt's tokens that may differ.", ("--risk",), default_text=f"{RISK:g}"
        ),
    ]
    exit_schedule: Annotated[
        str | None,
        Option(
            "In mode specee, the layers that judge a token: offline: the calibrated ones; online: those near the last "
            "exits; both; none: all layers.",
            ("--exit-schedule",),
            default_text=BOTH,
            choices=SCHEDULES,
        ),
    ]


class RunKeywords(TypedDict, total=False):
    """Keyword arguments that select what runs a plan, and what is recorded."""

    draft_head: Annotated[
        str | Path | None,
        Option(
            "An EAGLE draft head, 1 to 3.1: its folder, or a Hugging Face id; mtp: the checkpoint's MTP layer; none: "
            "no head.",
            ("--draft-head", "--spec-type"),
            default_text="the model's own, if any",
            typed=str,
        ),
    ]
    draft_model: Annotated[
        str | Path | None,
        Option(
            "A smaller model with the same vocabulary, which drafts for exact mode; named like the model.",
            ("-md", "--draft-model", "--model-draft", "-hfd", "--hf-repo-draft"),
            typed=str,
        ),
    ]
    emulate: Annotated[bool, Option("Run on the profile's machine, emulated here.")]
    traces: Annotated[bool, Option("Record what runs where and when.")]
    n_sequences: Annotated[
        int | None,
        Option("Sequences open at a time, for which a plan counts memory.", default_text=str(N_SEQUENCES)),
        Range(1, MAX_SEQUENCES),
    ]


MODEL = Option(
    "Folder, GGUF file, name from hetero-ee models, Hugging Face id or address, or org/name:QUANTIZATION.",
    ("-m", "--model", "-hf", "--hf-repo"),
    name="model",
    default_text="demo model",
    setting="model",
)
PROFILE = Option(
    "auto: plan by this machine's profile, measured for some seconds at a model's first start; off: don't plan, "
    "so that the CPU runs everything.",
    ("--profile",),
    name="profile",
    default=AUTO,
    choices=(AUTO, OFF),
    setting="profile",
)
PLAN = Option("Run this plan, as printed by plan --json, instead of making one.", ("--plan",), name="plan", typed=Path)
LIMITS = Option("The limits of a plan in one object.", name="limits")
FOLDERS = (
    Option(
        "Folder for converted models and compiled kernels.",
        name="cache_dir",
        kind=Path,
        default_text="the platform's cache folder",
        setting="cache_dir",
    ),
    Option(
        "Folder for measured profiles.",
        name="data_dir",
        kind=Path,
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
# Of evaluations and calibrations, whose messages name them.
MIN_CALIBRATION_TOKENS, MAX_CALIBRATION_TOKENS, CALIBRATION_TOKENS = 512, 10**7, 8192
TOKENS = Option(
    "Tokens to calibrate on.",
    ("--tokens",),
    name="tokens",
    kind=int,
    default=CALIBRATION_TOKENS,
    least=MIN_CALIBRATION_TOKENS,
    most=MAX_CALIBRATION_TOKENS,
)
N_PROMPTS = Option("Texts to generate and to score.", ("--prompts",), name="n_prompts", kind=int, least=1, most=10_000)
N_PROMPT_TOKENS = Option(
    "Tokens of --text that each begins with.",
    ("--prompt-tokens",),
    name="n_prompt_tokens",
    kind=int,
    least=1,
    most=2**20,
)
