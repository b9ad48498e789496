"""Texts for comparing modes: prompts that each mode continues, and held-out texts that it predicts."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.calibration.texts import CHARACTERS_PER_TOKEN, OPENINGS, begin_tokens
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import N_PROMPT_TOKENS, N_PROMPTS
from hetero_ee.quality.texts import SEPARATOR
from hetero_ee.text.tokenizer import Tokenizer

LEAST_SCORED_TOKENS = 16  # least tokens after a chunk's beginning

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Material:
    """Prompts and held-out texts for one comparison. Given held-out texts begin with the prompts."""

    prompts: tuple[Ids, ...]
    held_out: tuple[Ids, ...] | None  # None: full mode writes them
    description: str


def of_text(
    tokenizer: Tokenizer, text: str, n_prompts: int, n_prompt_tokens: int, n_new_tokens: int, description: str
) -> Material:
    """Split a text into chunks of n_prompt_tokens + n_new_tokens, starting with the beginnings of its documents.

    Raises: UsageError: if the text has fewer chunks than n_prompts.
    """
    begin = begin_tokens(tokenizer)
    size, least = n_prompt_tokens + n_new_tokens, n_prompt_tokens + min(LEAST_SCORED_TOKENS, n_new_tokens)
    documents = text[: CHARACTERS_PER_TOKEN * size * n_prompts].split(SEPARATOR)
    encoded = [tokenizer.encode(each.strip(), with_special_tokens=False) for each in documents if each.strip()]
    step = size - len(begin)
    cut = [(first, [*begin, *ids[first : first + step]]) for ids in encoded for first in range(0, len(ids), step)]
    chunks = [tuple(ids) for _, ids in sorted(cut, key=lambda each: each[0]) if len(ids) >= least]
    if len(chunks) < n_prompts:
        raise UsageError(
            f"the text makes {len(chunks)} chunks of {least} to {size} tokens and ",
            N_PROMPTS,
            f" is {n_prompts}; give a longer text, or lower ",
            N_PROMPTS,
            " or ",
            N_PROMPT_TOKENS,
            ".",
        )
    chosen = tuple(chunks[:n_prompts])
    return Material(tuple(chunk[:n_prompt_tokens] for chunk in chosen), chosen, description)


def of_the_model(tokenizer: Tokenizer, n_prompts: int) -> Material:
    """Return openings of many kinds of text as prompts, which full mode continues.

    Raises: UsageError: if n_prompts exceeds their number.
    """
    prompts: Sequence[list[int]] = [ids for opening in OPENINGS if (ids := tokenizer.encode(opening))]
    if n_prompts > len(prompts):
        raise UsageError(N_PROMPTS, f" is {n_prompts} and there are {len(prompts)} openings; lower it, or give a text.")
    return Material(tuple(map(tuple, prompts[:n_prompts])), None, "texts of the model's own")
