"""Compiles the grammars of sampling parameters for one model's tokenizer, with llguidance."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SAMPLING, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from hetero_ee.decoding.constrained.constraint import Constraint

MAX_KEPT = 16  # compiled grammars
MAX_CHARACTERS = 2**19  # of one: compiling takes time by their square, 6 s for 50,000 choices (busy Zen 4, 2026-11-24)
MAX_LEXER_STATES = 50_000  # of one, at 1 or 2 kB; llguidance's own limit is 250,000
MISSING = 'this needs the package llguidance; install it with pip install "hetero-ee[server]".'
# As Python's json.dumps writes it, on one line: models have read most of that, and where there is no choice of blanks
# most of what is between values is forced. A schema's own "x-guidance" comes first.
JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class Grammars:
    """Compiled grammars of one model. Several threads may share them."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        n_tokens: int,
        end_token_ids: Collection[int],
        n_kept: int = MAX_KEPT,
    ) -> None:
        """Prepare a tokenizer.

        Args:
            tokenizer_json: Content of tokenizer.json.
            n_tokens: Size of the model's vocabulary.
            n_kept: Number of compiled grammars to keep.
        """
        self._n_kept = n_kept
        self._tokenizer_json, self._n_tokens = tokenizer_json, n_tokens
        self._end_token_ids = sorted(end_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str | None, str | None], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def described(self) -> tuple[str, int, list[int]]:
        """Return the constructor's arguments for another process: tokenizer.json, vocabulary size and end tokens."""
        return self._tokenizer_json(), self._n_tokens, self._end_token_ids

    def knows(self, params: SamplingParams) -> bool:
        """Return whether the parameters have no grammar, or one that is already compiled."""
        return not params.is_constrained or _key(params) in self._kept

    def constraint(self, params: SamplingParams) -> "Constraint | None":
        """Return a constraint for a new sequence, or None if the parameters have no grammar.

        Each grammar is compiled once, which may take a second.

        Raises: UsageError: if a grammar or schema is invalid or can't be enforced.
        """
        if not params.is_constrained:
            return None
        try:
            from hetero_ee.decoding.constrained.constraint import Constraint
        except ImportError as error:
            raise UsageError(MISSING) from error
        banned = [each for each in self._end_token_ids if each < self._n_tokens] if params.ignore_eos else []
        return Constraint(self._compiled(params).deep_copy(), self._n_tokens, banned)

    def _compiled(self, params: SamplingParams) -> "LLMatcher":
        key = _key(params)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = self._matcher(params)  # nobody waits for it whose own is compiled
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > self._n_kept:
                self._kept.popitem(last=False)
        return found

    def _matcher(self, params: SamplingParams) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        option = SAMPLING["grammar" if params.json_schema is None else "json_schema"]
        n_characters = len(params.json_schema or params.grammar or "")
        if n_characters > MAX_CHARACTERS:
            raise UsageError(option, f" has {n_characters} characters; expected at most {MAX_CHARACTERS}.")
        try:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            matcher = LLMatcher(self._tokenizer, _grammar_text(params), log_level=0, limits=limits)
        except ValueError as error:
            raise UsageError(option, f" can't be read: {_first_line(str(error))}.") from error
        if matcher.is_error():
            raise UsageError(option, f" {_reason(matcher.get_error())}.")
        return matcher

    def _read_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = self._tokenizer_json()
        ends: list[int] | None = self._end_token_ids or None
        try:
            try:
                return LLTokenizer(text, n_vocab=self._n_tokens, eos_token=ends)
            except ValueError:  # a tokenizer with tokens that the model lacks
                return LLTokenizer(text, eos_token=ends)
        except Exception as error:
            raise UsageError(
                f"this model's tokenizer is none that a grammar can be held to ({_first_line(str(error))})."
            ) from error


def _key(params: SamplingParams) -> tuple[str | None, str | None]:
    return params.json_schema, params.grammar


def _grammar_text(params: SamplingParams) -> str:
    """Return the grammar in llguidance's format. Raises: ValueError: if a schema is invalid."""
    from llguidance import LLMatcher, grammar_from

    if params.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(params.json_schema, defaults=JSON_STYLE)  # type: ignore[arg-type]
    text = params.grammar or ""
    return grammar_from("gbnf" if "::=" in text else "lark", text)


def _reason(error: str) -> str:
    """Return the second half of a sentence that explains llguidance's error."""
    if found := UNIMPLEMENTED.search(error):
        names = ", ".join(json.loads(f"[{found[1]}]"))
        return f"asks for {names}, which a text can't be held to here; leave that out"
    return f"can't be used: {_first_line(error)}"


def _first_line(text: str) -> str:
    """Return the first line of an error message, together with the lines that begin with "error:"."""
    first, *others = [line.strip() for line in text.splitlines() if line.strip()] or ["it is refused"]
    line = " ".join([first, *(each for each in others if each.startswith("error:"))])[:300].rstrip(" .;:")
    return line if line.isprintable() else ascii(line)[1:-1]
