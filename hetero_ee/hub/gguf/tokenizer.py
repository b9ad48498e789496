"""Translate the tokenizer in a GGUF file's metadata to tokenizer.json and tokenizer_config.json.

Byte-level BPE ("gpt2") stores merges and the name of a rule that splits text. Sentencepiece's BPE ("llama") stores a
score for each piece, which implies the merges.
"""

import json
from dataclasses import dataclass
from typing import Any

from hetero_ee.errors import ModelError, shown
from hetero_ee.hub.gguf.header import GgufHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
MAX_ADDED_TOKENS = 20_000  # control and user-defined tokens, which are added one by one; Gemma has 6,400
# Each cut of a piece may be a merge, so work grows with the sum of squared lengths; Gemma's is about 2 * 10^7.
MAX_CUTS = 5 * 10**7
LETTER, NUMBER, MARKS = r"[^\r\n\p{L}\p{N}]?", r"\p{N}", r"\p{Lm}\p{Lo}\p{M}"
SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS, _SIGNS = rf"{SUFFIXES}|{LETTER}\p{{L}}+|{NUMBER}", r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}" + MARKS + "]", r"[\p{Ll}" + MARKS + "]"


@dataclass(frozen=True, slots=True)
class Splitting:
    """Rule that splits text before merging. A pattern of None means GPT-2's own."""

    pattern: str | None
    single_digits: bool = False
    composed: bool = False  # normalizes to Unicode's form C first
    whole_words: bool = False  # a split that is a token needs no merges
    adds_begin: bool = False  # default if the file does not say whether to add the begin token
    first: tuple[str, ...] = ()  # patterns that split the text before `pattern` splits the parts


_GPT2, _SMOLLM = Splitting(None), Splitting(None, single_digits=True)
_CL100K = f"{_WORDS}{{1,3}}{_SIGNS}"
_LLAMA3 = Splitting(_CL100K, whole_words=True, adds_begin=True)
_QWEN2 = Splitting(_WORDS + _SIGNS, composed=True)
_QWEN35 = Splitting(  # as qwen2, with combining marks as parts of words
    rf"{SUFFIXES}|{LETTER}[\p{{L}}\p{{M}}]+|{NUMBER}" + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES, composed=True
)
_TEKKEN = Splitting(
    f"{LETTER}{_UPPER}*{_LOWER}+|{LETTER}{_UPPER}+{_LOWER}*|{NUMBER}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES,
    whole_words=True,
    adds_begin=True,
)
_O200K = Splitting(
    f"{LETTER}{_UPPER}*{_LOWER}+{SUFFIXES}?|{LETTER}{_UPPER}+{_LOWER}*{SUFFIXES}?|{NUMBER}"
    + r"{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + SPACES
)
# DeepSeek's letters are the cased ones without some rare scripts, signs and mathematical alphabets.
_RARE = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68\U00010570-\U000105bc"
    "\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001df2a"
)
_CASED = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_RARE}]]+"
_MARKED = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK = Splitting(
    r"\p{N}+", first=(r"[\r\n]", _CASED, _MARKED, r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
)
_DEEPSEEK_3 = Splitting(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + SPACES,
    first=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
# By tokenizer.ggml.pre.
SPLITTINGS = {
    **dict.fromkeys(("gpt-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting(_CL100K)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "stablelm2": Splitting(_WORDS + _SIGNS),
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK_3,
}


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """Return file contents by name. Raises ModelError for an unknown kind of tokenizer or rule that splits text."""
    vocabulary = _Vocabulary(header)
    try:
        backend = vocabulary.sentencepiece() if vocabulary.kind == "llama" else vocabulary.byte_level()
        text = backend.to_str()
    except ModelError:
        raise
    except BaseException as error:  # bare Exceptions, and panics of Rust code, which derive from BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise header.failure(f"its tokenizer can't be made ({shown(str(error))})") from error
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {"tokenizer_config.json": json.dumps(config | vocabulary.special_tokens())}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files | {"tokenizer.json": text}


def check_vocabulary(header: GgufHeader) -> None:
    """Check that the tokenizer's type and its rule for splitting text are known. Raises ModelError."""
    _Vocabulary(header)


class _Vocabulary:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._fail = header, header.failure
        self.kind, self._pre = self._get("model"), self._get("pre")
        if self.kind not in ("llama", "gpt2"):
            raise self._fail(f"its tokenizer is of kind {shown(self.kind)}; supported are llama and gpt2")
        if self.kind == "gpt2" and (not isinstance(self._pre, str) or self._pre not in SPLITTINGS):
            raise self._fail(
                f"its tokenizer splits text by {shown(self._pre)} (tokenizer.ggml.pre), which is unknown; known are "
                f"{', '.join(SPLITTINGS)}; give the original model in safetensors"
            )
        self.tokens: list[str] = self._list("tokens", str)
        self._types: list[int] = self._list("token_type", int, [NORMAL] * len(self.tokens))
        if len(self._types) != len(self.tokens):
            raise self._fail(f"it has {len(self.tokens)} tokens and types of {len(self._types)}")
        self._ids = {token: index for index, token in reversed(list(enumerate(self.tokens)))}
        n_added = sum(kind in (CONTROL, USER_DEFINED) for kind in self._types)
        if n_added > MAX_ADDED_TOKENS:
            raise self._fail(f"it has {n_added} control and user-defined tokens, expected at most {MAX_ADDED_TOKENS}")

    def byte_level(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        splitting = SPLITTINGS[str(self._pre)]
        model = models.BPE(self._ids, self._written_merges(), ignore_merges=splitting.whole_words)
        tokenizer = Tokenizer(model)
        if splitting.composed:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
        patterns = (*splitting.first, *([splitting.pattern] if splitting.pattern else []))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return self._completed(tokenizer, adds_begin=splitting.adds_begin)

    def sentencepiece(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        unknown = self._special("unknown") or next(
            (token for token, kind in zip(self.tokens, self._types, strict=True) if kind == UNKNOWN), None
        )
        merges = self._written_merges() if self._get("merges") else self._implied_merges()
        model = models.BPE(self._ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        has_prefix = self._get("add_space_prefix") is not False
        spaces = [normalizers.Prepend("\u2581")] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "\u2581")])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
        return self._completed(tokenizer, adds_begin=True)

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens by their names in tokenizer_config.json."""
        named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {field: text for field, name in named.items() if (text := self._special(name)) is not None}

    def _completed(self, tokenizer: Any, *, adds_begin: bool) -> Any:
        from tokenizers import AddedToken, processors

        special_types = (CONTROL, UNKNOWN) if self.kind == "llama" else (CONTROL,)
        typed = [(token, kind) for token, kind in zip(self.tokens, self._types, strict=True) if token]
        special = [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind in special_types]
        plain = [AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED]
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)
        begin = self._special("bos") if self._flag("add_bos_token", adds_begin) else None
        end = self._special("eos") if self._flag("add_eos_token", False) else None
        if begin or end:
            used = [text for text in (begin, end) if text]
            text = [*([begin] if begin else []), "$A", *([end] if end else [])]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=text, special_tokens=[(each, self._ids[each]) for each in dict.fromkeys(used)]
            )
        return tokenizer

    def _written_merges(self) -> list[tuple[str, str]]:
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if any(len(merge) != 2 for merge in merges):
            raise self._fail("its tokenizer has a merge that is not of two pieces")
        return merges

    def _implied_merges(self) -> list[tuple[str, str]]:
        """Return the merges that the scores imply: all pairs of pieces that join to a piece, the best score first."""
        scores, ids = self._list("scores", float), self._ids
        if len(scores) != len(self.tokens):
            raise self._fail(f"it has {len(self.tokens)} tokens and scores of {len(scores)}")
        if (n_cuts := sum(len(token) ** 2 for token in self.tokens)) > MAX_CUTS:
            raise self._fail(f"the squared lengths of its tokens add up to {n_cuts}, expected at most {MAX_CUTS}")
        found: list[tuple[float, int, int, int, str, str]] = []
        for token, index in ids.items():
            if self._types[index] != NORMAL:
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    found.append((-scores[index], index, ids[left], ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _special(self, name: str) -> str | None:
        index = self._get(f"{name}_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise self._fail(f"{name}_token_id is {shown(index)}, expected one of its {len(self.tokens)} tokens")
        return self.tokens[index]

    def _flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        return value if isinstance(value, bool) else default

    def _list(self, name: str, kind: type, default: Any = None) -> Any:
        values = self._get(name)
        if values is None:
            values = default
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self._fail(f"tokenizer.ggml.{name} is {shown(values)}, expected a list of {kind.__name__}")
        return values

    def _get(self, name: str) -> Any:
        return self._header.metadata.get(f"tokenizer.ggml.{name}")
