"""Bounds how much a sentencepiece character map (`Precompiled` normalizer) can lengthen a text.

A map is the size of a trie in bytes, the trie (darts-clone: a double array of 32-bit units), and the replacements, each
terminated by a zero byte. The tokenizers library replaces a whole grapheme by the replacement of its shortest prefix
that the trie holds. The library panics on a trie that points outside itself, so this module refuses such maps.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_KEY_BYTES = 5  # the library looks up graphemes of at most 5 bytes and single characters
_IS_VALUE = 1 << 31
Positions = npt.NDArray[np.int64]


class DamagedMapError(ValueError):
    """A character map can't be decoded, or its trie points outside the map."""


def largest_growth(charsmap: Any) -> float:
    """Return the most output bytes per input byte that a base64 character map can produce, at least 1.

    Raises:
        DamagedMapError: if it is not a valid map.
    """
    try:
        data = base64.b64decode(charsmap or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise DamagedMapError from error
    if not data:
        return 1.0
    start = 4 + int.from_bytes(data[:4], "little")
    if start % 4 or not 4 < start <= len(data):
        raise DamagedMapError
    try:
        data[start:].decode()
    except UnicodeDecodeError as error:
        raise DamagedMapError from error
    replacements = np.frombuffer(data[start:], np.uint8)
    ends = np.append(np.flatnonzero(replacements == 0), len(replacements))
    growth = 1.0
    for n_key_bytes, values in _values_by_key_bytes(data[4:start]):
        if values.max() >= len(replacements) or (replacements[values] & 0xC0 == 0x80).any():  # inside a character
            raise DamagedMapError
        growth = max(growth, float((ends[np.searchsorted(ends, values)] - values).max() / n_key_bytes))
    return growth


def _values_by_key_bytes(trie: bytes) -> Iterator[tuple[int, Positions]]:
    """Yield for each length of keys, in bytes, the values of all keys that long. A value is a replacement's position.

    A unit's label is one byte of a key, and its position is that of its parent's children XOR that byte. So each unit
    has only one possible parent, and a level of the trie is found in one pass over the units.
    """
    units = np.frombuffer(trie, "<u4").astype(np.int64)
    labels, values = units & (_IS_VALUE | 0xFF), units & ~_IS_VALUE
    children = np.arange(len(units)) ^ (units >> 10 << ((units >> 9 & 1) * 8))
    has_value = units >> 8 & 1 == 1
    inner = np.flatnonzero((labels > 0) & (labels < 256))
    level = children[:1]
    for n_key_bytes in range(1, MAX_KEY_BYTES + 1):
        # The library tries any byte below a node, and reads the unit there before it compares the label.
        if not len(level) or (level.max() | 0xFF) >= len(units):
            raise DamagedMapError
        in_level = np.zeros(len(units), bool)
        in_level[level] = True
        reached = inner[in_level[inner ^ labels[inner]]]
        if not len(reached):
            return
        level = np.unique(children[reached])
        at_end = children[reached[has_value[reached]]]
        if len(at_end) and at_end.max() >= len(units):
            raise DamagedMapError
        if len(at_end):
            yield n_key_bytes, values[at_end]
