"""Arithmetic of PTX instructions on arrays with one value per thread. Results equal NVIDIA's hardware bit by bit."""

import functools
from typing import Any

import numpy as np

from tests.gpu.ptx.parsing import PtxError

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
UNSIGNED = {8: U8, 16: U16, 32: U32, 64: U64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
NAN32 = U32(0x7FFFFFFF)  # the NaN that NVIDIA's fp32 arithmetic returns
WORD = 0xFFFFFFFF
SMALLEST_NORMAL = np.float32(1.17549435e-38)


def shifted(shift: Any, value: Any, by: Any) -> Any:
    """Shift by np.left_shift or np.right_shift. By at least the word's bits, 0 or the sign is left."""
    bits = value.dtype.itemsize * 8
    if by.ndim == 0 and by < bits:
        return shift(value, value.dtype.type(by))
    result = shift(value, np.minimum(by, bits - 1).astype(value.dtype))
    return result if shift is np.right_shift and value.dtype.kind == "i" else np.where(by < bits, result, result * 0)


def divide(a: Any, b: Any) -> Any:
    """Divide integers and round towards 0."""
    if not np.all(b):
        raise PtxError("integer division by 0")
    if a.dtype.kind == "u":
        return a // b
    wide_a, wide_b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    quotient = np.abs(wide_a) // np.abs(wide_b)
    return np.where((wide_a < 0) != (wide_b < 0), -quotient, quotient).astype(a.dtype)


def mul_hi(a: Any, b: Any) -> Any:
    """Return the upper half of the double-width product."""
    if a.dtype.itemsize <= 4:
        wide = np.int64 if a.dtype.kind == "i" else U64
        return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
    assert a.dtype == U64, a.dtype
    mask, half = U64(0xFFFFFFFF), U64(32)
    low_a, high_a, low_b, high_b = a & mask, a >> half, b & mask, b >> half
    low, cross, other = low_a * low_b, high_a * low_b, low_a * high_b
    carry = ((low >> half) + (cross & mask) + (other & mask)) >> half
    return high_a * high_b + (cross >> half) + (other >> half) + carry


def bfe(a: Any, position: Any, length: Any) -> Any:
    """Extract a bit field that lies within the word. Fields of signed words are sign-extended."""
    bits, position, length = a.dtype.itemsize * 8, int(position), int(length)
    assert 0 < length <= bits - position
    return (a << a.dtype.type(bits - position - length)) >> a.dtype.type(bits - length)


def prmt(a: Any, b: Any, selector: Any) -> Any:
    """Select each byte of the result from the 8 bytes of a and b by a nibble of the selector.

    If bit 3 of the nibble is set, all bits of the result's byte are the sign bit of the selected byte.
    """
    result = U32(0)
    pool = [(word >> U32(8 * byte)) & U32(255) for word in (a, b) for byte in range(4)]
    for i in range(4):
        nibble = (selector >> U32(4 * i)) & U32(15)
        part = pool[int(nibble) & 7] if nibble.ndim == 0 else np.choose(nibble & U32(7), pool)
        signs = (part >> U32(7)) * U32(255)
        part = np.where(nibble & U32(8), signs, part) if np.any(nibble & U32(8)) else part
        result = result | (part << U32(8 * i))
    return result


def lop3(a: Any, b: Any, c: Any, table: int) -> Any:
    """Return for each bit position bit 4 a + 2 b + c of the table.

    Computed for whole words, as an exclusive or of products (and) of a, b and c.
    """
    terms = [table >> place & 1 for place in range(8)]
    for bit in (1, 2, 4):
        terms = [term ^ (terms[place ^ bit] if place & bit else 0) for place, term in enumerate(terms)]
    result = U32(WORD * terms[0])
    for place in (place for place in range(1, 8) if terms[place]):
        words = [word for n, word in enumerate((a, b, c)) if place >> (2 - n) & 1]
        result = result ^ functools.reduce(np.bitwise_and, words)
    return result


def dp4a(a: Any, b: Any, c: Any) -> Any:
    """Add the products of the four signed bytes of a and b to c."""
    for byte in range(4):
        left, right = ((word >> U32(8 * byte)).astype(np.int8).astype(np.int32) for word in (a, b))
        c = c + (left * right).view(U32)
    return c


def canonical(value: Any) -> Any:
    """Replace every NaN by the one that NVIDIA's fp32 arithmetic returns."""
    is_nan = value != value
    return np.where(is_nan, NAN32.view(np.float32), value) if is_nan.any() else value


def flush(value: Any) -> Any:
    """Replace subnormal numbers by 0 with their sign (flush to zero)."""
    tiny = np.abs(value) < SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), value), value) if tiny.any() else value


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in fp32, rounded once.

    The fp64 product is exact. If rounding the fp64 sum again could go wrong, that sum is rounded to odd first.
    """
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.atleast_1d(product + wide)
    bits = total.view(np.int64)
    doubtful = ((bits & 0x1FFFFFFF) == 0x10000000) | (np.abs(total) < 2.0**-125)
    if doubtful.any():
        rest = total - product
        error = (product - (total - rest)) + (wide - rest)
        wrong = (error != 0) & np.isfinite(error) & np.isfinite(total) & ((bits & 1) == 0)
        away = (error > 0) == (total > 0)
        total = np.where(wrong, np.where(away, bits + 1, bits - 1), bits).view(np.float64)
    return total.reshape(np.shape(product + wide)).astype(np.float32)


def maximum(a: Any, b: Any) -> Any:
    """Return the maximum, with -0 below +0. NaN is ignored if the other one is a number."""
    zeros = (a == 0) & (b == 0)
    return canonical(np.where(zeros, (a.view(U32) & b.view(U32)).view(np.float32), np.fmax(a, b)))


def rounded(function: Any, value: Any) -> Any:
    """Apply a function in fp64 and round its result to fp32."""
    return canonical(function(value.astype(np.float64)).astype(np.float32))


def truncated(value: Any) -> Any:
    """Round fp64 numbers to fp32, towards 0."""
    near = value.astype(np.float32)
    return canonical((near.view(np.int32) - (np.abs(near) > np.abs(value))).astype(np.int32).view(np.float32))


def jittered(value: Any) -> Any:
    """Move each value by -2 to 2 units in the last place, by an amount that depends only on the value."""
    bits = np.ascontiguousarray(value).view(np.int32)
    off = ((bits * np.int32(-1640531527)) >> np.int32(16)) % np.int32(5) - np.int32(2)
    fits = np.isfinite(value) & (np.abs(value) > 1e-36) & (np.abs(value) < 1e38)
    return np.where(fits, bits + off, bits).astype(np.int32).view(np.float32)


def to_float(value: Any, kind: Any) -> Any:
    """Convert to a float type. Every NaN becomes the one that NVIDIA's conversions return."""
    result = value.astype(kind)
    if kind == np.float16:
        return np.where(value != value, U16(0x7FFF).view(np.float16), result)
    return canonical(result) if kind == np.float32 else result


def to_integer(value: Any, kind: Any) -> Any:
    """Round towards 0 to a type of at most 32 bits. Numbers out of range become the nearest in range, NaN becomes 0."""
    bounds = np.iinfo(kind)
    whole = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=1e30, neginf=-1e30)
    return np.clip(whole, float(bounds.min), float(bounds.max)).astype(kind)
