"""Character maps of sentencepiece, built from the replacements they make."""

from collections.abc import Mapping

import numpy as np

IS_VALUE, HAS_VALUE = 1 << 31, 1 << 8
BLOCK = 256  # each node of the trie gets as many units, so that its children never meet another's


def character_map(replacements: Mapping[str, str]) -> bytes:
    """A map that replaces each key, laid out as `hetero_ee.text.character_map` describes."""
    nodes: dict[bytes, int] = {b"": BLOCK}
    for key in replacements:
        for n_bytes in range(1, len(key.encode()) + 1):
            nodes.setdefault(key.encode()[:n_bytes], BLOCK * (len(nodes) + 1))
    units, texts = np.zeros(BLOCK * (len(nodes) + 1), np.uint32), b""
    units[0] = nodes[b""] << 10
    for prefix, node in nodes.items():
        if prefix:
            position = nodes[prefix[:-1]] ^ prefix[-1]
            units[position] = prefix[-1] | (position ^ node) << 10
    for key, text in replacements.items():
        encoded = key.encode()
        units[nodes[encoded[:-1]] ^ encoded[-1]] |= HAS_VALUE
        units[nodes[encoded]] = IS_VALUE | len(texts)
        texts += text.encode() + b"\0"
    return packed(units, texts)


def packed(units: np.ndarray, texts: bytes) -> bytes:
    trie = units.astype("<u4").tobytes()
    return len(trie).to_bytes(4, "little") + trie + texts
