"""Continues prompts in an early-exit mode and counts where their tokens exit."""

from collections.abc import Sequence

from hetero_ee.calibration.stages import Chunk
from hetero_ee.decoding.requests import Ending
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.early_exit import EarlyExits, generate_early
from hetero_ee.speculation.exit_statistics import ExitCounts, ExitStatistics
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.policies.exit_head import exit_heads
from hetero_ee.speculation.policies.policy import ExitPolicy
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.weights.model_weights import UNQUANTIZED

MAX_PENDING = 7  # pending tokens of a sequence
N_TEXTS, PROMPT_TOKENS, NEW_TOKENS = 16, 16, 64  # of mode specee


def followed(
    executor: Executor, ending: Ending, policy: ExitPolicy, prompts: Sequence[Chunk], params: SamplingParams
) -> tuple[list[list[int]], ExitStatistics]:
    """Generate from the prompts with exact keys and values, in one batch. Returns the sequences with their prompts."""
    texts, counts = [[*prompt] for prompt in prompts], ExitCounts()
    exits = EarlyExits(policy, MAX_PENDING)
    asked = [[*prompt] for prompt in prompts]
    for token in generate_early(executor, asked, params, ending, lambda ids: "", lambda: 0.0, exits, counts):
        texts[token.sequence].append(token.token_id)
    return texts, counts.statistics(executor.spec.n_layers)


def specee_depths(
    executor: Executor, ending: Ending, calibration: Calibration, chunks: Sequence[Chunk]
) -> tuple[int, ...]:
    """Count the tokens of mode specee without a draft head by the layers that they ran, 1 to all.

    Returns () if the calibration has no exit layers.

    Args:
        chunks: The sequences start with the beginnings of some of them.
    """
    if not calibration.schedule:
        return ()
    n_layers, schedule = calibration.n_layers, calibration.schedule
    heads = exit_heads(calibration, range(schedule[0], n_layers), compiled=executor.weights.quantizer != UNQUANTIZED)
    prompts = [chunk[:PROMPT_TOKENS] for chunk in chunks[:N_TEXTS]]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    _, found = followed(executor, ending, SpecEE(heads, schedule, n_layers), prompts, params)
    return found.depths[1:] if found.n_tokens else ()
