"""Check tokenizer files before the tokenizers library reads them.

The library executes whatever tokenizer.json says: forty replacements of one letter by two make a terabyte.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_ee.errors import ModelError, shown
from hetero_ee.hub.json_text import not_json, parse_json
from hetero_ee.hub.model_files import CONFIG_FILE, INDEX_FILE, SMALL_FILES
from hetero_ee.hub.regular_file import find_file, read_file, reason_of, refuse_special
from hetero_ee.text.character_map import DamagedMapError, largest_growth
from hetero_ee.text.split_pattern import why_slow

Warn = Callable[[str], None]
MAX_TOKENIZER_BYTES = 64 * 2**20  # the largest published ones have 33 MB
MAX_TOKENIZER_VALUES = 5 * 10**6  # in its JSON; the largest published ones have 2 million
MAX_TOKEN_ID = 2**20  # gaps before an id cost memory; the largest published vocabularies have 2^18
# Tokens besides the vocabulary; speech models have 65,536. transformers needs 3 s for 10^5 (2 cores, 2026-11-22).
MAX_ADDED_TOKENS, MANY_ADDED_TOKENS = 2**17, 20_000
MAX_STEPS = 100  # per stage; published ones have up to ten
MAX_GROWTH = 1000.0  # output bytes per input byte of all stages together; Llama's bound is 12
# Files that have their own readers, which check them.
OTHER_FILES = (CONFIG_FILE, INDEX_FILE, "generation_config.json", "manifest.json", "weights.bin")
READ_FILES = (
    *(name for name in SMALL_FILES if name not in OTHER_FILES),
    *("vocab.txt", "spiece.model", "tiktoken.model", "tekken.json"),
)
TEMPLATE_FOLDER = "additional_chat_templates"
# Fields of tokenizer_config.json that would name other files, or another vocabulary than tokenizer.json's.
FOREIGN_FIELDS = ("fast_tokenizer_files", "gguf_file", "init_inputs", "merges", "tokenizer_object", "vocab")
# A file named by settings of older releases, which is never opened.
UNUSED_FILE_FIELD = "special_tokens_map_file"
TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")  # in addition to bos_token and the like
DECODER, ADDED_FILES = "added_tokens_decoder", ("added_tokens.json", "special_tokens_map.json")
TOKEN_PLACES = (*TOKEN_LISTS, "added_tokens")
TOKEN_FIELDS = {"content", "lstrip", "rstrip", "normalized", "single_word", "special"}
STAGES = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# Most output bytes per input byte of a step. Normal forms: UAX 15, table of expansion factors.
_GROWTH = {
    kind: growth
    for growth, kinds in (
        (1, "Strip StripNormalizer StripAccents Nmt BertPreTokenizer CharDelimiterSplit Whitespace WhitespaceSplit"),
        (1, "Split Punctuation Digits UnicodeScripts FixedLength Fuse ByteFallback BertProcessing RobertaProcessing"),
        (2, "Lowercase ByteLevel WordPiece"),
        (3, "NFC NFD BPEDecoder CTC"),
        (4, "Metaspace"),
        (6, "BertNormalizer"),
        (11, "NFKC NFKD"),
    )
    for kind in kinds.split()
}

_PLAIN_ITEM = re.compile(r"([^\\^$.|?*+()\[\]{}])(?:\{(\d{1,3}),\}|\+)?")
_PLAIN = re.compile(rf"(?:\\A)?((?:{_PLAIN_ITEM.pattern})+)")


def check_converted(backend: Any, folder: Path) -> None:
    """Check the stages of a tokenizer that was converted from other files than tokenizer.json. Raises ModelError."""
    made = getattr(backend, "backend_tokenizer", None)  # missing in classes written in Python
    try:
        stages = {name: getattr(made, name, None) for name in STAGES}
        _check_stages({name: json.loads(stage.__getstate__()) for name, stage in stages.items() if stage is not None})
    except RefusedError as error:
        raise ModelError(f"the tokenizer in {folder} can't be used ({error}).") from error


def check_tokenizer_files(folder: Path, warn: Warn) -> None:
    """Check that every tokenizer file in `folder` is a regular file of bounded size, work and growth.

    Warns about many added tokens, which need time to read.

    Raises:
        ModelError: names the file and the reason.
    """
    n_added = 0
    try:
        files = list(_read_files(folder))
    except OSError as error:
        raise ModelError(f"{folder} can't be listed ({reason_of(error)}).") from error
    for file in files:
        data = read_file(file, MAX_TOKENIZER_BYTES, "a tokenizer")
        try:
            if file.suffix == ".json":
                n_added = max(n_added, _check_json(file.name, parse_json(data, MAX_TOKENIZER_VALUES)))
        except ValueError as error:
            reason = not_json(data, error) if type(error) is not RefusedError else f"can't be used ({error})"
            raise ModelError(f"the tokenizer in {folder} can't be read: {file.name} {reason}.") from error
    if n_added > MANY_ADDED_TOKENS:
        warn(f"The tokenizer has {n_added:,} added tokens, so reading it needs some time")


class RefusedError(ValueError):
    """A parsed file is refused. The message is the reason."""


def _read_files(folder: Path) -> Iterator[Path]:
    """Yield every file in the folder that the library reads. Raises ModelError for one that must not be opened."""
    for parent in (folder, folder / TEMPLATE_FOLDER):
        for entry in sorted(parent.iterdir()) if parent.is_dir() else ():
            is_linked_folder = entry.name == TEMPLATE_FOLDER and entry.is_symlink()
            if entry.name in READ_FILES or entry.suffix == ".jinja" or is_linked_folder:
                if find_file(parent, entry.name):
                    yield entry
            elif entry.name not in OTHER_FILES and entry.suffix != ".safetensors":
                refuse_special(entry)  # some tokenizer class may read a file of that name


def _check_json(name: str, values: Any) -> int:
    """Check a parsed file and return its number of added tokens."""
    if not isinstance(values, dict):
        return 0  # its reader refuses it
    if name == "tokenizer_config.json":
        for field, value in values.items():
            if value and (field in FOREIGN_FIELDS or (field.endswith("_file") and field != UNUSED_FILE_FIELD)):
                raise RefusedError(f"field {shown(field)} is not supported")
        _check_ids(values.get(DECODER))
    if name == "special_tokens_map.json":  # its fields become arguments of the tokenizer, even names of its files
        for field in values:
            if not field.endswith("_token") and field not in TOKEN_LISTS:
                raise RefusedError(f"field {shown(field)} is not supported")
    if name == "tokenizer.json":
        _check_model(values.get("model"))
        _check_stages(values)
        values = {"added_tokens": values.get("added_tokens")}  # not the vocabulary
    lists = [values] if name in ADDED_FILES else [values.get(field) for field in (*TOKEN_PLACES, DECODER)]
    n_added = max(len(_children(each)) for each in lists)
    if n_added > MAX_ADDED_TOKENS:
        raise RefusedError(f"it has {n_added} added tokens, expected at most {MAX_ADDED_TOKENS}")
    _check_tokens(name, values)
    return n_added


def _check_tokens(name: str, values: Mapping[str, Any]) -> None:
    more_fields = {"tokenizer_config.json": {"__type"}, "tokenizer.json": {"id"}}.get(name, set())
    for field, value in values.items():  # special tokens, alone or in lists and objects
        is_decoder = field == DECODER  # there the library does not remove the type
        _check_token(value, more_fields, certain=field.endswith("_token"))
        for token in _children(value):
            _check_token(token, set() if is_decoder else more_fields, certain=is_decoder or field in TOKEN_PLACES)
            _check_inner_tokens(token, more_fields)


def _check_token(token: Any, more_fields: set[str], *, certain: bool) -> None:
    """Check a token's fields, because the library prints names of unknown ones, unescaped, to standard output.

    If not `certain`, the value is a token only if it has a token's content or type.
    """
    if isinstance(token, dict) and (certain or isinstance(token.get("content"), str) or "__type" in token):
        for field in token:
            if field not in TOKEN_FIELDS | more_fields or (field == "__type" and token[field] != "AddedToken"):
                raise RefusedError(f"a token has a field {shown(field)}, which is not supported")


def _check_inner_tokens(value: Any, more_fields: set[str]) -> None:
    """Check objects with a token's type, which may be nested at any depth."""
    waiting = list(_children(value))
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict) and "__type" in found:
            _check_token(found, more_fields, certain=True)
        waiting += _children(found)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _check_model(model: Any) -> None:
    """Refuse dropout, which leaves out merges at random, as in training: a prompt would have many encodings."""
    if isinstance(model, dict) and model.get("dropout"):
        raise RefusedError(f"its dropout is {shown(model['dropout'])}, which is not supported")


def _check_ids(decoder: Any) -> None:
    for token_id in decoder if isinstance(decoder, dict) else ():
        if not token_id.isdecimal() or len(token_id) > 7 or int(token_id) > MAX_TOKEN_ID:
            raise RefusedError(f"token id {shown(token_id)} is not from 0 to {MAX_TOKEN_ID}")


def _check_stages(values: Mapping[str, Any]) -> None:
    growth = 1.0
    for stage, sequence in STAGES.items():
        steps = list(_steps(values.get(stage), sequence))
        for kind, step in steps:
            growth *= _growth(kind, step)
            if growth > MAX_GROWTH:
                raise RefusedError(f"its {stage} could turn one byte into more than {MAX_GROWTH:g}")
            _check_pattern(step.get("pattern"))
        if stage == "post_processor":
            growth = 1.0  # the decoder starts from one token again


def _steps(step: Any, sequence: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (kind, fields) of each step of a stage. Steps may be nested in sequences."""
    waiting, n_steps = [step], 0
    while waiting:
        found = waiting.pop()
        n_steps += 1
        if n_steps > MAX_STEPS:
            raise RefusedError(f"it has more than {MAX_STEPS} {sequence}")
        if found is None:
            continue
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            raise RefusedError(f"one of its {sequence} is {shown(found)}, expected an object with a type")
        if found["type"] == "Sequence":
            parts = found.get(sequence)
            waiting += parts if isinstance(parts, list) else [parts]
        else:
            yield found["type"], found


def _growth(kind: str, step: Mapping[str, Any]) -> float:
    if kind == "Replace":
        return _replacement_growth(step.get("pattern"), _bytes_of(step.get("content")))
    if kind == "Prepend":
        return 1 + _bytes_of(step.get("prepend"))
    if kind == "Precompiled":
        return _map_growth(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        return _template_growth(step)
    if kind not in _GROWTH:
        raise RefusedError(f"type {shown(kind)} is not supported")
    return _GROWTH[kind]


def _replacement_growth(pattern: Any, n_content_bytes: int) -> float:
    """Return how much a replacement lengthens a text: a string is replaced where it occurs, an expression anywhere."""
    pattern = pattern if isinstance(pattern, dict) else {}
    n_bytes = _bytes_of(pattern.get("String")) or _fewest_bytes(pattern.get("Regex"))
    return max(1.0, n_content_bytes / n_bytes) if n_bytes else 1 + n_content_bytes


def _fewest_bytes(expression: Any) -> int:
    """Return a lower bound of the bytes that an expression matches: 0 if it is more than characters and repetitions."""
    plain = _PLAIN.fullmatch(expression) if isinstance(expression, str) else None
    return sum(_bytes_of(item[1]) * int(item[2] or 1) for item in _PLAIN_ITEM.finditer(plain[1])) if plain else 0


def _map_growth(charsmap: Any) -> float:
    try:
        return largest_growth(charsmap)
    except DamagedMapError as error:
        raise RefusedError("its character map is damaged") from error


def _template_growth(step: Mapping[str, Any]) -> int:
    """Return how often a template repeats the text. Apart from that, it adds only a few special tokens."""
    pieces, specials = step.get("single"), step.get("special_tokens")
    specials = specials.values() if isinstance(specials, dict) else ()
    ids = [special.get("ids") for special in specials if isinstance(special, dict)]
    if not all(isinstance(parts, list) and len(parts) <= MAX_STEPS for parts in (pieces, *ids)):
        raise RefusedError(f"its template has more than {MAX_STEPS} parts")
    return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces or ()))


def _check_pattern(pattern: Any) -> None:
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    reason = why_slow(expression) if isinstance(expression, str) else None
    if reason:
        raise RefusedError(f"its expression {shown(expression)} {reason}")


def _bytes_of(text: Any) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0
