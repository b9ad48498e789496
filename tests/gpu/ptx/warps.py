"""Instructions that a whole warp executes together: shuffles, reductions, and matrix loads, stores and products."""

from typing import Any

import numpy as np

from tests.gpu.ptx.arithmetic import U16, U32, truncated
from tests.gpu.ptx.parsing import PtxError

LANE = np.arange(32)
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


class Warps:
    """Warp instructions. Each raises PtxError if the threads of a warp have diverged."""

    shared_words: Any
    kernel: Any
    warp_time: Any
    first_program: int
    full: Any
    place: Any

    def warp(self, c: Any) -> Any:
        """Return the number of each thread's warp among those that run now."""
        return c // 32 - self.first_program * self.kernel.n_threads // 32

    def warp_barrier(self, c: Any) -> None:
        whole(c, "bar.warp.sync")
        self.warp_time[self.warp(c[::32])] += 1

    def ldmatrix(self, c: Any, at: Any, n: int, is_transposed: bool, site: int) -> Any:
        """Load n matrices of 8 rows with 16 bytes. Lanes 8 i to 8 i + 7 give the addresses of matrix i's rows."""
        whole(c, "ldmatrix")
        rows = self.place(c, "shared", at, 16, c % 32 < 8 * n, site, False).reshape(-1, 32)
        results = []
        for i in range(n):
            matrix = self.shared_words.view(U16)[rows[:, 8 * i : 8 * i + 8, None] // 2 + np.arange(8)]
            matrix = matrix.transpose(0, 2, 1) if is_transposed else matrix
            low, high = (matrix[:, LANE // 4, LANE % 4 * 2 + half].astype(U32) for half in (0, 1))
            results.append((low | high << U32(16)).reshape(-1))
        return results

    def stmatrix(self, c: Any, at: Any, values: Any, site: int) -> None:
        """Store matrices in the layout that ldmatrix loads."""
        whole(c, "stmatrix")
        rows = self.place(c, "shared", at, 16, c % 32 < 8 * len(values), site, True).reshape(-1, 32)
        for i, value in enumerate(values):
            self.shared_words.view(U32)[rows[:, 8 * i + LANE // 4] // 4 + LANE % 4] = value.reshape(-1, 32)

    def shuffle(self, c: Any, value: Any, by: Any, clamp: Any, mode: str) -> Any:
        """Return the value of another lane, or the lane's own value if the other lane is outside its segment.

        Args:
            by: offset, mask or index of the other lane, depending on `mode` (up, bfly, idx).
            clamp: PTX's operand c, which encodes the segments.
        """
        whole(c, "shfl.sync")
        lane, by, clamp = c % 32, np.asarray(by, np.int64) & 31, np.asarray(clamp, np.int64)
        segment = clamp >> 8 & 31
        first, last = lane & segment, (lane & segment) | (clamp & 31 & ~segment)
        wanted = {"up": lane - by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
        wanted = np.where(wanted >= last if mode == "up" else wanted <= last, wanted, lane)
        return np.take_along_axis(self.full(c, value).reshape(-1, 32), wanted.reshape(-1, 32), 1).reshape(-1)

    def redux(self, c: Any, value: Any, operation: str) -> Any:
        whole(c, "redux.sync")
        rows = self.full(c, value).reshape(-1, 32)
        return np.repeat(REDUCTIONS[operation].reduce(rows, 1, dtype=rows.dtype), 32)

    def mma(self, c: Any, a: Any, b: Any, start: Any, n_halves: int, kind: Any) -> Any:
        """Multiply matrices of signed bytes or fp16 numbers and add `start`.

        In lane 4 r + j, register p of `a` holds row r + 8 (p % n_halves), and the j-th word of the 4 words of columns
        in part p // n_halves of k. Sums of at most 32 products of bytes are below 2^20, so fp64 computes them exactly.
        Sums of fp16 products are truncated to fp32, as hardware does, which may also drop bits of the products.

        Args:
            n_halves: number of 8-row halves of the result: 2 for m16n8k32 and m16n8k16 of fp16, 1 for m8n8k16.
            kind: np.int8 or np.float16.
        """
        whole(c, "mma.sync")
        n_warps = len(c) // 32
        a, b = (np.stack([np.ascontiguousarray(word).view(kind) for word in part]) for part in (a, b))
        left = a.reshape(-1, n_halves, n_warps, 8, len(a[0]) // n_warps // 8).astype(float).transpose(2, 1, 3, 0, 4)
        right = b.reshape(-1, n_warps, 8, left.shape[-1]).astype(float).transpose(1, 0, 3, 2)
        product = left.reshape(n_warps, 8 * n_halves, -1) @ right.reshape(n_warps, -1, 8)
        product = product.reshape(n_warps, n_halves, 8, 4, 2)  # warp, half, r, j, token % 2
        parts = [product[:, place // 2, :, :, place % 2].reshape(-1) for place in range(2 * n_halves)]
        if kind == np.int8:
            return [part.astype(np.int32).view(U32) + given for part, given in zip(parts, start, strict=True)]
        return [truncated(part + given.view(np.float32)).view(U32) for part, given in zip(parts, start, strict=True)]


def whole(c: Any, name: str) -> None:
    """Check that the threads form whole warps, in order. Raises: PtxError: if not, naming the instruction `name`."""
    if len(c) % 32 or (c // 32 != np.repeat(c[::32] // 32, 32)).any():
        raise PtxError(f"{name} in a warp whose threads have diverged")
