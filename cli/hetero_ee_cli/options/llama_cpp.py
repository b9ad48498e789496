"""Flags of llama.cpp that this command line does not offer, and what to do instead."""

ONE_GPU = "one GPU is used, the first that CUDA shows; choose it with CUDA_VISIBLE_DEVICES"
NO_SAMPLER = "use --temp, --top-k, --top-p or --min-p"
POSITIONS = "the model's own configuration decides its positions; leave it out"
THREADS_ARE_FREE = "threads are not pinned; run hetero-ee under taskset or numactl"

# Each row: flags that mean the same, and the end of a sentence that says what to do instead.
ROWS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("-b", "--batch-size"),
        "the plan chooses how many tokens of a prompt a pass reads, or -ub does; leave it out",
    ),
    (("-tb", "--threads-batch"), "prompts and text use the same threads; use -t"),
    (
        ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
        "keys and values have one type; use --kv-type int8 for q8_0, fp16 for f16, or fp32 for f32",
    ),
    (("-nkvo", "--no-kv-offload"), "keys and values are stored where attention runs; use -ot '.*attention=cpu'"),
    (("--mlock",), "the system keeps a mapped model in RAM while it fits; leave it out"),
    (("--mmap", "--no-mmap"), "converted models are always memory-mapped; leave it out"),
    (
        ("--keep", "--context-shift", "--no-context-shift"),
        "a text ends when its context is full, and a chat then forgets its oldest messages but keeps the system "
        "message; leave it out, or raise -c",
    ),
    (
        ("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"),
        "no prompt is kept on disk; hetero-ee serve keeps shared beginnings of prompts in memory",
    ),
    (("-fa", "--flash-attn"), "every device has one kernel for attention, which never stores its scores; leave it out"),
    (
        (
            *("-ngld", "--gpu-layers-draft", "-devd", "--device-draft", "-cd", "--ctx-size-draft"),
            *("--spec-draft-ngl", "--spec-draft-device", "--spec-draft-ctx-size"),
        ),
        "the plan decides where a draft model runs, with the model's own context; leave it out",
    ),
    (
        (
            *("--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min", "--draft-p-min"),
            *("--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"),
        ),
        "the plan decides when drafting pays; --draft-length limits it",
    ),
    (("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "-dev", "--device"), ONE_GPU),
    (("--numa", "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "--poll"), THREADS_ARE_FREE),
    (
        ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
        "adapters are not applied while running; merge them into the checkpoint first",
    ),
    (("--mmproj", "--image", "--audio"), "models read only text; leave it out"),
    (("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--override-kv"), POSITIONS),
    (("--repeat-last-n",), "--repeat-penalty counts the whole prompt and text; leave it out"),
    (("--typical", "--typical-p", "--top-nsigma", "--top-n-sigma"), NO_SAMPLER),
    (("--xtc-probability", "--xtc-threshold", "--dynatemp-range", "--dynatemp-exp"), NO_SAMPLER),
    (("--mirostat", "--mirostat-lr", "--mirostat-ent", "--samplers", "--sampler-seq", "--sampling-seq"), NO_SAMPLER),
    (
        ("--dry-multiplier", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n", "--dry-sequence-breaker"),
        "use --repeat-penalty, --presence-penalty or --frequency-penalty",
    ),
    (("--no-escape",), "escapes in a prompt are replaced only with -e; leave it out"),
    (("--jinja", "--no-jinja"), "chat templates are always rendered as Jinja; leave it out"),
    (("--chat-template",), "a chat template is read from a file; use --chat-template-file"),
    (("-sysf", "--system-prompt-file"), 'the system message is text; use --system "$(cat FILE)"'),
    (("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"), "use hetero-ee chat"),
    (("-no-cnv", "--no-conversation"), "use hetero-ee generate"),
    (("-st", "--single-turn"), "hetero-ee run answers its prompt once; leave it out"),
    (("-co", "--color", "-sp", "--special", "--warmup", "--no-warmup"), "leave it out"),
    (("--display-prompt", "--no-display-prompt"), "a prompt is shown only on a terminal; leave it out"),
    (("-hff", "--hf-file"), "a file is named by its quantization; use -hf org/name:Q4_K_M"),
    (("-hft", "--hf-token"), "the token is an environment variable, HF_TOKEN; leave it out"),
    (("-mu", "--model-url"), "models come from the Hugging Face Hub; use -hf"),
    (("--metrics", "--slots", "--props"), "the server always answers its paths; leave it out"),
    (("--verbose-prompt", "-lv", "--verbosity", "--perf", "--no-perf"), "use -v for times, counts and rates"),
    (("-cb", "--cont-batching", "-nocb", "--no-cont-batching"), "the server always batches requests; leave it out"),
)
NOT_OFFERED = {flag: advice for flags, advice in ROWS for flag in flags}
