"""Tokens of exact and early-exit modes from a loop of their own."""

from collections.abc import Callable, Iterator

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending, Prompts
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.early_exit import EarlyExitMode, EarlyExits
from hetero_ee.speculation.exact import ExactMode
from hetero_ee.speculation.statistics import DraftCounts, ExitCounts
from hetero_ee.text.text_stream import Decode


def generate_exact(
    executor: Executor,
    prompts: Prompts,
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    drafting: Drafting,
    counts: DraftCounts | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens that full mode yields, and count the drafts in `counts`.

    For a Continuation, the draft sources must already have observed the cached prefix.
    """
    mode = ExactMode(executor, drafting, counts or DraftCounts(), clock)
    return generate(executor, prompts, params, ending, decode, clock, mode)


def generate_early(
    executor: Executor,
    prompts: Prompts,
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    exits: EarlyExits,
    counts: ExitCounts | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens of all prompts as they come, and count them in `counts`."""
    mode = EarlyExitMode(executor, exits, counts or ExitCounts(), clock)
    return generate(executor, prompts, params, ending, decode, clock, mode)
