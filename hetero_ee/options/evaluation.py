"""Options of evaluations and calibrations that messages of the library name, each stated once."""

from hetero_ee.options.option import Option

MIN_CALIBRATION_TOKENS, MAX_CALIBRATION_TOKENS, CALIBRATION_TOKENS = 512, 10**7, 8192
TOKENS = Option(
    name="tokens",
    kind=int,
    help="Tokens to calibrate on.",
    default=CALIBRATION_TOKENS,
    least=MIN_CALIBRATION_TOKENS,
    most=MAX_CALIBRATION_TOKENS,
    flags=("--tokens",),
)
N_PROMPTS = Option(
    name="n_prompts", kind=int, help="Texts to generate and to score.", least=1, most=10_000, flags=("--prompts",)
)
N_PROMPT_TOKENS = Option(
    name="n_prompt_tokens",
    kind=int,
    help="Tokens of --text that each begins with.",
    least=1,
    most=2**20,
    flags=("--prompt-tokens",),
)
