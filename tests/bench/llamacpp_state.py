"""A sequence's state as llama.cpp 0.5 writes it, made longer: a context of thousands of tokens without decoding them.

Words of 4 bytes: 2 of no interest, number of streams, number of cells; a cell's position, number of sequences and
sequence; whether values are transposed, number of layers; keys of each layer, then values: kind, size of a row (8
bytes), rows; of transposed values kind, size of an element, number of rows, rows over all cells.
"""

import numpy as np

CELLS_AT, CELL_WORDS, HEAD_BYTES = 16, 3, 12


def longer_state(state: bytes, n_tokens: int) -> bytes:
    """The same keys and values again and again, up to n_tokens. Raises ValueError for what is laid out otherwise."""
    found = np.frombuffer(state, np.uint8)
    _, _, n_streams, n_cells = _words(found, 0, 4)
    cells = _words(found, CELLS_AT, CELL_WORDS * n_cells).reshape(n_cells, CELL_WORDS)
    if n_streams != 1 or n_cells < 1 or (cells != [[at, 1, cells[0, 2]] for at in range(n_cells)]).any():
        raise ValueError("no state of one sequence from its first token on")
    new_cells = np.array([[at, 1, cells[0, 2]] for at in range(n_tokens)], "<u4")
    at = CELLS_AT + 4 * CELL_WORDS * n_cells
    is_transposed, n_layers = _words(found, at, 2)
    parts = [found[:12], np.array([n_tokens], "<u4").view(np.uint8), new_cells.reshape(-1).view(np.uint8)]
    parts.append(found[at : at + 8])
    at += 8
    again = np.arange(n_tokens) % n_cells
    for part in range(2 * n_layers):
        _, size, more = _words(found, at, 3)
        parts.append(found[at : at + HEAD_BYTES])
        at += HEAD_BYTES
        if part >= n_layers and is_transposed:
            shape, axis = (int(more), n_cells, int(size)), 1
        else:
            shape, axis = (n_cells, int(size)), 0
        n_bytes = int(np.prod(shape))
        parts.append(_piece(found, at, n_bytes).reshape(shape).take(again, axis).reshape(-1))
        at += n_bytes
    if at != len(found):
        raise ValueError(f"{len(found)} bytes of a state of {at}")
    return np.concatenate(parts).tobytes()


def _words(found: np.ndarray, at: int, n_words: int) -> np.ndarray:
    return _piece(found, at, 4 * n_words).view("<u4").astype(np.int64)


def _piece(found: np.ndarray, at: int, n_bytes: int) -> np.ndarray:
    if not 0 <= n_bytes <= len(found) - at:
        raise ValueError(f"{n_bytes} bytes at {at} of a state of {len(found)}")
    return found[at : at + n_bytes]
