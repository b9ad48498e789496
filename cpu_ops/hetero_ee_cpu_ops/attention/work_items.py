"""Division of attention's queries into work items of one key head each, and the sizes of tiles that these need.

Parameters that the functions share:
    table, n_rows: address of kv_table.py's table of the rows, and their number.
    group: query heads per key head.      most: most queries of an item.
"""

from typing import Any

from hetero_ee_cpu_ops.attention.kv_table import COLUMNS, KEYS, PATH, POSITION
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.simd.bytes import word

TILE_QUERIES = 4  # items hold whole tiles of this many queries, except the last item of a sequence
NEEDS_TWO, NEEDS_EIGHT = 1, 2  # bits of the set of tile sizes besides 4 that items need: 2 and 8 queries


@inner
def _run_end(table: int, row: int, n_rows: int) -> int:
    """Return the end of the consecutive rows, starting at `row`, that belong to the same sequence.

    Positions are compared too: addresses of two sequences whose memory begins at different positions may be equal.
    A row of a draft tree with a path of its own is alone.
    """
    line = table + 8 * COLUMNS * row
    end = row + 1
    while end < n_rows and word(table + 8 * COLUMNS * end, KEYS) == word(line, KEYS):
        if word(table + 8 * COLUMNS * end, POSITION) != word(line, POSITION) + end - row:
            break
        if word(line, PATH) or word(table + 8 * COLUMNS * end, PATH):
            break
        end += 1
    return end


@inner
def _even(n_queries: int, most: int) -> int:
    """Return the queries per item of a sequence: whole tiles, at most `most`, that make items about equal."""
    n_parts = -(-n_queries // most)
    return -(-n_queries // (TILE_QUERIES * n_parts)) * TILE_QUERIES


@inner
def count_parts(table: int, n_rows: int, group: int, most: int) -> int:
    """Return the number of work items per key head, over all sequences."""
    n_parts, row = 0, 0
    while row < n_rows:
        end = _run_end(table, row, n_rows)
        n_queries = (end - row) * group
        n_parts += -(-n_queries // _even(n_queries, most))
        row = end
    return n_parts


@inner
def tile_bit(n_queries: int) -> int:
    """Return NEEDS_TWO or NEEDS_EIGHT if an item of n_queries uses these tiles, 0 if it uses tiles of 4."""
    return NEEDS_TWO if n_queries == 2 else NEEDS_EIGHT if 6 <= n_queries <= 8 else 0


@inner
def needed_tiles(table: int, n_rows: int, group: int, most: int) -> int:
    """Return the tile bits that the work items of all sequences need, NEEDS_TWO | NEEDS_EIGHT at most.

    The items of a sequence have equal sizes except the last, so two sizes per sequence are checked.
    """
    needed, row = 0, 0
    while row < n_rows:
        end = _run_end(table, row, n_rows)
        n_queries = (end - row) * group
        size = min(n_queries, _even(n_queries, most))
        needed |= tile_bit(size) | tile_bit(n_queries - (n_queries - 1) // size * size)
        row = end
    return needed


@inner
def part_queries(table: int, n_rows: int, group: int, most: int, number: int) -> Any:
    """Return the range of queries (first, end) of a key head's work item `number`, counted row by row."""
    row = 0
    while True:
        end = _run_end(table, row, n_rows)
        size = _even((end - row) * group, most)
        n_parts = -(-(end - row) * group // size)
        if number < n_parts:
            first = row * group + number * size
            return first, min(first + size, end * group)
        number -= n_parts
        row = end
