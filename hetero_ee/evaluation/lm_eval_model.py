"""Makes an engine available to lm-evaluation-harness as the model `hetero_ee`, in a process of its own.

    python -m hetero_ee.evaluation.lm_eval_model --model hetero_ee --model_args pretrained=./my-llama --tasks arc_easy

No other module imports this file. It runs lm_eval's own command, which only knows other packages' models after they are
imported. The results equal those of `local-completions` with a server, to the last digit.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hetero_ee.decoding.logprobs import TokenLogprobs
from hetero_ee.engine import Engine
from hetero_ee.errors import UsageError
from hetero_ee.text.chat_template import ChatTemplate, Message

MAX_GENERATED_TOKENS = 256  # where a task says nothing, as lm_eval's other models have it
HARNESS = ("batch_size", "max_batch_size", "device")  # arguments that lm_eval passes to every model


@register_model("hetero_ee")
class HeteroEE(TemplateLM):
    """lm_eval's view of an engine. It reads one text at a time, without a begin token as is lm_eval's default. Batches
    would not change a digit."""

    def __init__(self, pretrained: str | None = None, add_bos_token: bool = False, **options: Any) -> None:
        """Open the model. `pretrained` and `options` are those of `Engine.from_pretrained`; None is the demo model.

        Raises: HeteroError: if it can't be opened.
        """
        super().__init__()
        chosen = {name: value for name, value in options.items() if name not in HARNESS}
        self._engine = Engine.from_pretrained(pretrained, **chosen)
        self._adds_bos = add_bos_token
        if self._engine.exits is not None:
            self._engine.close()
            raise UsageError("an early-exit mode has no log-likelihoods; use mode full or exact.")

    @property
    def max_length(self) -> int:
        """Maximum number of tokens read: the context minus one for the token that a server would generate."""
        return self._engine.executor.most_tokens - 1

    @property
    def eot_token_id(self) -> int:
        """Id of the end token. Raises: UsageError: if the model has none."""
        token_id = self._engine.tokenizer.eos_token_id
        if token_id is None:
            raise UsageError("the tokenizer has no end token, without which lm_eval can't measure.")
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text without context."""
        begin = self._engine.tokenizer.special_tokens.get("bos_token")
        return self.eot_token_id if begin is None else self.tok_encode(begin, add_special_tokens=False)[0]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which distinguishes cached requests of different models."""
        return f"{self._engine.spec.architecture}-{self._engine.spec.vocab_size}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text. Raises: HeteroError: if the tokenizer fails."""
        adds = self._adds_bos if add_special_tokens is None else add_special_tokens
        return self._engine.tokenizer.encode(string, with_special_tokens=adds)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._engine.tokenizer.chat_template

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text. Raises: HeteroError: if the template refuses it."""
        source = self._engine.tokenizer.chat_template
        if source is None or not add_generation_prompt:
            raise UsageError("this model has no chat template, or none that goes on from a reply of its own.")
        template = ChatTemplate(source, self._engine.tokenizer.special_tokens)
        try:
            return template.render([Message(each["role"], each["content"]) for each in chat_history])
        finally:
            template.close()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's summed log-probability, and whether all its tokens are the likeliest."""
        return [self._loglikelihood(context, continuation) for _, context, continuation in requests]

    def _loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = (context + continuation)[-self.max_length :]
        n_context = len(ids) - len(continuation)
        if n_context < 1:
            raise UsageError(
                f"a continuation has {len(continuation)} tokens and at most {self.max_length - 1} can be measured."
            )
        said = self._scored(ids)[n_context - 1 :]  # the first token has none
        return sum(each.logprob for each in said), all(each.logprob == each.top[0][1] for each in said)

    def _scored(self, ids: list[int]) -> list[TokenLogprobs]:
        cache = self._engine.executor.cache
        sequence = cache.open_new()
        try:
            return [each for some in self._engine.prompt_logprobs(sequence, ids, 1) for each in some]
        finally:
            cache.close(sequence)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts. Texts that exceed the context are split into windows."""
        found = []
        for (text,) in (each.args for each in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            found.append(sum(self._loglikelihood(*make_disjoint_window(each))[0] for each in windows))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return generated texts up to the first of their stop strings. They are greedy by default."""
        return [self._generated(*each.args) for each in requests]

    def _generated(self, context: str, asked: dict[str, Any]) -> str:
        until = asked.get("until") or []
        n_new = asked.get("max_tokens", asked.get("max_gen_toks", MAX_GENERATED_TOKENS))
        ids = self.tok_encode(context)[-max(1, self.max_length - n_new) :]
        changes = {name: asked[name] for name in ("top_p", "top_k") if name in asked}
        stop = [until] if isinstance(until, str) else [each for each in until if each]
        return self._engine.generate(
            ids, max_new_tokens=n_new, temperature=asked.get("temperature", 0), stop=stop, **changes
        ).text


def _run() -> None:
    """Run lm_eval's command line, to which this model is registered."""
    import lm_eval.models  # noqa: F401  the others' names, which are not read where one is known already
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    _run()
