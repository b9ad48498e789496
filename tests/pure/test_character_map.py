"""The bound of a character map's growth: reached by the library, never exceeded, and none for damaged maps."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from hetero_ee.text.character_map import DamagedMapError, largest_growth
from tests.character_maps import BLOCK, HAS_VALUE, IS_VALUE, character_map, packed

KEYS = st.text(st.sampled_from("aé日😀\u0301"), min_size=1, max_size=2).filter(lambda key: len(key.encode()) <= 5)


def bound(data: bytes) -> float:
    return largest_growth(base64.b64encode(data).decode())


def observed(data: bytes, texts: Any) -> float:
    made = normalizers.Precompiled(data)
    return max(len(made.normalize_str(text).encode()) / len(text.encode()) for text in texts)


@pytest.mark.parametrize(("rule", "growth"), [("nmt_nfkc", 11.0), ("nfkc_cf", 11.0), ("identity", 1.0)])
def test_the_maps_of_sentencepiece_grow_by_what_their_longest_replacement_says(
    rule: str, growth: float, tmp_path: Path
) -> None:
    spm = pytest.importorskip("sentencepiece")
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a girl.\n" * 9)
    spm.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        minloglevel=2,
    )
    model = pb.ModelProto.FromString((tmp_path / "m.model").read_bytes())
    data = model.normalizer_spec.precompiled_charsmap
    assert bound(data) == growth
    if data:  # ﷺ is replaced by 18 characters
        assert observed(data, map(chr, range(1, 0xD800))) <= growth == observed(data, "\ufdfa")


@given(st.dictionaries(KEYS, st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), min_size=1))
def test_no_text_grows_by_more_than_the_bound(replacements: dict[str, str]) -> None:
    data = character_map(replacements)
    assert observed(data, replacements) <= bound(data)
    assert bound(data) == max(1, *(len(text.encode()) / len(key.encode()) for key, text in replacements.items()), 1)


def test_a_trie_that_leads_back_to_itself_has_a_bound() -> None:
    units = np.zeros(2 * BLOCK, np.uint32)
    units[0] = BLOCK << 10
    units[BLOCK ^ ord("a")] = ord("a") | ord("a") << 10  # aaa... without an end
    units[BLOCK ^ ord("b")] = ord("b") | HAS_VALUE | ord("b") << 10
    units[BLOCK] = IS_VALUE
    assert bound(packed(units, b"x" * 50)) == 50


def changed(change: Callable[[np.ndarray], None]) -> bytes:
    """The map of a -> é after a change of its units."""
    whole = character_map({"a": "é"})
    size = 4 + int.from_bytes(whole[:4], "little")
    units = np.frombuffer(whole[4:size], "<u4").copy()
    change(units)
    return packed(units, whole[size:])


DAMAGED: dict[str, str | bytes] = {
    "no base64": "?",
    "shorter than its size": b"\xff\xff\xff\x7f",
    "of a size that holds no units": (3).to_bytes(4, "little") + bytes(9),
    "without units": bytes(4) + b"x",
    "with no room for the first byte": packed(np.zeros(1, np.uint32), b"x"),
    "with children outside": changed(lambda units: units.__setitem__(BLOCK ^ ord("a"), ord("a") | 9 << 19)),
    "with a value outside": changed(lambda units: units.__setitem__(BLOCK ^ ord("a"), ord("a") | HAS_VALUE | 9 << 19)),
    "with a replacement outside": changed(lambda units: units.__setitem__(2 * BLOCK, IS_VALUE | 99)),
    "with a replacement inside a character": changed(lambda units: units.__setitem__(2 * BLOCK, IS_VALUE | 1)),
    "of another encoding": packed(np.zeros(BLOCK, np.uint32), b"\xff\xfe"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_map_is_refused(name: str) -> None:
    data = DAMAGED[name]
    with pytest.raises(DamagedMapError):
        largest_growth(data if isinstance(data, str) else base64.b64encode(data).decode())
