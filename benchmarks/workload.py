"""The grid, and for each point of it the tables and ids that every side reads."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "GRID",
    "GROWTH",
    "IDS",
    "LARGE_BATCHES",
    "LONGEST",
    "QUICK_GRID",
    "QUICK_GROWTH",
    "Ids",
    "Norm",
    "Point",
    "Tables",
    "aligned",
    "draw_far_tables",
    "draw_ids",
    "draw_norm",
    "draw_tables",
    "growth_shape",
]

Array = NDArray[Any]


class Point(NamedTuple):
    """Shape of a result: batch, sequence length, width."""

    batch: int
    length: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of one call."""
        return self.batch * self.length

    @property
    def bytes(self) -> int:
        """Size of a float32 result."""
        return 4 * self.tokens * self.width

    def __str__(self) -> str:
        return f"({self.batch}, {self.length}, {self.width})"


GRID = (
    Point(1, 1, 768),
    Point(1, 8, 384),
    Point(1, 128, 384),
    Point(1, 128, 768),
    Point(1, 512, 768),
    Point(8, 128, 768),
    Point(32, 128, 768),
    Point(32, 512, 1024),
)
LARGE_BATCHES = (Point(64, 128, 768), Point(16, 512, 768))  # besides, where threads have to pay
QUICK_GRID = (Point(1, 1, 48), Point(2, 40, 33))

LONGEST = 512
GROWTH = tuple(4**k for k in range(11))  # tokens of a call, up to 1,048,576
QUICK_GROWTH = (1, 16, 1024)

ROWS, QUICK_ROWS = 30522, 1000
POSITIONS = LONGEST
SEGMENTS = 2
IDS = ("uniform", "zipf")


class Tables(NamedTuple):
    """Token, position and segment table, of one type."""

    token: Array
    position: Array
    segment: Array


class Norm(NamedTuple):
    """LayerNorm's parameters."""

    weight: Array
    bias: Array
    eps: float = 1e-12


class Ids(NamedTuple):
    """Ids of one call, int64."""

    token: Array
    segment: Array


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Uninitialised memory at a multiple of 64 bytes, as PyTorch and ONNX Runtime prefer it."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


@cache
def draw_tables(width: int, dtype: type[np.float32] | type[np.float64], quick: bool) -> Tables:
    """Tables as BERT initialises them: normal with deviation 0.02."""
    rng = np.random.default_rng(width)
    rows = (QUICK_ROWS if quick else ROWS, POSITIONS, SEGMENTS)
    tables = Tables(*(aligned((n, width), dtype) for n in rows))
    for table in tables:
        rng.standard_normal(out=table, dtype=dtype)
        table *= dtype(0.02)
    return tables


@cache
def draw_far_tables(width: int, quick: bool) -> Tables:
    """Float32 tables whose sums have mean 10 and deviation 0.01, where LayerNorm is hardest."""
    drawn = draw_tables(width, np.float32, quick)
    tables = Tables(*(aligned(table.shape, np.float32) for table in drawn))
    for table, source, mean, factor in zip(
        tables, drawn, (10, 0, 0), (0.5, 0.01, 0.01), strict=True
    ):
        np.multiply(source, np.float32(factor), out=table)
        table += np.float32(mean)
    return tables


def draw_norm(width: int) -> Norm:
    """A LayerNorm with every weight and bias its own."""
    rng = np.random.default_rng(width)
    weight, bias = aligned((width,), np.float32), aligned((width,), np.float32)
    weight[:] = rng.normal(1, 0.1, width)
    bias[:] = rng.normal(0, 0.1, width)
    return Norm(weight, bias)


def growth_shape(tokens: int) -> tuple[int, int]:
    """Batch and length of a call with so many tokens."""
    length = min(tokens, LONGEST)
    return tokens // length, length


def draw_ids(point: Point, kind: str, quick: bool) -> Ids:
    """Token ids, uniform or Zipf-like (the k-th commonest has weight 1/k); two segments a row."""
    rng = np.random.default_rng([*point, IDS.index(kind)])
    rows = QUICK_ROWS if quick else ROWS
    shape = (point.batch, point.length)
    if kind == "uniform":
        token = rng.integers(0, rows, shape)
    else:
        weights = 1 / np.arange(1, rows + 1)
        # permuted: common rows do not lie side by side in the table
        token = rng.permutation(rows)[rng.choice(rows, shape, p=weights / weights.sum())]
    turns = rng.integers(1, point.length + 1, (point.batch, 1))
    segment = (np.arange(point.length) >= turns).astype(np.int64)
    return Ids(token, segment)
