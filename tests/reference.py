"""The sum of the three rows, computed slowly and plainly, for the tests to hold the package to.

Nothing here comes from the package. The sum is the NumPy expression itself, in the widest of the
result's and the tables' types; rounding to the result's type is written as arithmetic, because
`ml_dtypes` casts float64 to bfloat16 by way of float32 and so rounds twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

try:
    import ml_dtypes
except ImportError:
    BFLOAT16 = None
else:
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Array = NDArray[Any]

# Binary digits, smallest and largest exponent of a normal number.
FORMATS = {"float32": (24, -126, 127), "float16": (11, -14, 15), "bfloat16": (8, -126, 127)}


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is bfloat16; NumPy takes a comparison with None for one with float64."""
    return BFLOAT16 is not None and dtype == BFLOAT16


@dataclass(frozen=True)
class Quantized:
    """What a quantized table is made of: eight-bit values, float32 scales, zero points."""

    values: Array
    scale: Array | np.float32
    zero_point: Array | int | None = None


def rounded(values: Array, digits: int, min_exponent: int, max_exponent: int) -> Array:
    """Round float64 values to the nearest of a narrower format, ties to even, once.

    Every step but `rint` is exact: the values are scaled by a power of two so that one unit in
    the last place of the target, subnormal or not, becomes 1.
    """
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(values)
        unit = np.maximum(exponent - 1, min_exponent) - (digits - 1)
        nearest = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
        infinite = np.copysign(np.inf, values)
        nearest = np.where(np.abs(nearest) < 2.0 ** (max_exponent + 1), nearest, infinite)
        return np.where(np.isnan(values), np.nan, nearest)


def round_once(values: ArrayLike, dtype: DTypeLike) -> Array:
    """Cast float32 or float64 values to `dtype` with one rounding."""
    wide, target = np.asarray(values), np.dtype(dtype)
    if target == np.float64:
        return wide.astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        narrow = rounded(wide.astype(np.float64), *FORMATS[target.name]).astype(np.float32)
    if is_bfloat16(target):  # the upper half of a float32
        return (narrow.view(np.uint32) >> 16).astype(np.uint16).view(target)
    return narrow.astype(target)


def decoded(table: Any) -> Array:
    """A table's values, exactly, as float32 or float64."""
    if isinstance(table, Quantized):
        zero = 0 if table.zero_point is None else np.asarray(table.zero_point).astype(np.int32)
        steps = table.values.astype(np.int32) - np.reshape(zero, (-1, 1))
        with np.errstate(all="ignore"):
            product: Array = steps.astype(np.float32) * np.reshape(np.float32(table.scale), (-1, 1))
        assert product.dtype == np.float32
        return product
    array = np.asarray(table)
    if is_bfloat16(array.dtype):
        bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    narrow = array.dtype.newbyteorder("=") in (np.float32, np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return array.astype(np.float32 if narrow else np.float64)


def reference_sum(
    token_ids: ArrayLike,
    segment_ids: ArrayLike | None,
    token_embeddings: Any,
    position_embeddings: Any,
    segment_embeddings: Any,
    *,
    position_ids: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
) -> Array:
    """Return what `bert_embeddings` must return for the same valid arguments."""
    tables = [decoded(t) for t in (token_embeddings, position_embeddings, segment_embeddings)]
    wide = [t.dtype for t in tables] + [np.dtype(dtype)]
    compute = np.float64 if np.dtype(np.float64) in wide else np.float32
    with np.errstate(invalid="ignore"):  # signalling NaNs
        computing: list[Array] = [t.astype(compute) for t in tables]
    token, position, segment = computing

    tokens = np.asarray(token_ids).astype(np.int64)
    segments = np.asarray(0 if segment_ids is None else segment_ids).astype(np.int64)
    if position_ids is None:
        positions = np.arange(tokens.shape[-1])
    else:
        positions = np.asarray(position_ids).astype(np.int64)
    segments = np.broadcast_to(segments, tokens.shape)
    positions = np.broadcast_to(positions, tokens.shape)

    with np.errstate(all="ignore"):
        total: Array = (token[tokens] + position[positions]) + segment[segments]
    assert total.dtype == compute
    return round_once(total, dtype)


def bits(array: Array) -> Array:
    """The array's elements as unsigned integers, in native byte order."""
    native = np.ascontiguousarray(array)
    native = native.astype(native.dtype.newbyteorder("="), copy=False)
    return native.view(f"u{native.dtype.itemsize}")


def assert_same_bits(actual: Any, expected: Array) -> None:
    """Assert equal shape, type and bits; of NaN only the position counts."""
    assert type(actual) is np.ndarray
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual_nan, expected_nan = np.isnan(decoded(actual)), np.isnan(decoded(expected))
    differ = (actual_nan != expected_nan) | ((bits(actual) != bits(expected)) & ~expected_nan)
    if differ.any():
        place = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(
            f"{int(differ.sum())} of {differ.size} elements differ, the first at {place}: "
            f"{actual[place]!r} (bits {int(bits(actual)[place]):#x}) is not "
            f"{expected[place]!r} (bits {int(bits(expected)[place]):#x})"
        )
