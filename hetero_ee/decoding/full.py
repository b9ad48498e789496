"""Full-depth decoding: every token passes every layer. The reference for all other ways to decode."""

from collections.abc import Callable, Iterator

from torch import Tensor

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.texts import Ending, Prompts, Text, in_own_sequences, last_tokens, prefill, step, texts_of
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.text.text_stream import Decode


def generate(
    executor: Executor,
    prompts: Prompts,
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
) -> Iterator[GeneratedToken]:
    """Yields the tokens of all prompts as they come. Closing the iterator frees the sequences' memory."""
    texts = texts_of(prompts, params, decode, ending, clock())
    yield from in_own_sequences(executor, texts, _tokens(executor, texts, clock))


def _tokens(executor: Executor, texts: list[Text], clock: Callable[[], float]) -> Iterator[GeneratedToken]:
    """The loop: the rest of each prompt, then a token of every unfinished text a pass."""
    logits_of = {text.sequence: prefill(executor, text) for text in texts}
    while logits_of:
        for sequence, logits in logits_of.items():
            yield step(texts[sequence], logits, clock())
        active = [text for text in texts if not text.finished]
        logits_of = _decode_step(executor, active) if active else {}


def _decode_step(executor: Executor, active: list[Text]) -> dict[int, Tensor]:
    """One pass with the last token of every active sequence; sequence -> logits (vocab,)."""
    logits = executor.logits(last_tokens(active), range(len(active)))
    return {text.sequence: logits[row] for row, text in enumerate(active)}
