"""The grid, and for each point of it the tables and ids that every side reads."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "GRID",
    "IDS",
    "QUICK_GRID",
    "Ids",
    "Norm",
    "Point",
    "Tables",
    "draw_ids",
    "draw_norm",
    "draw_tables",
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
QUICK_GRID = (Point(1, 1, 48), Point(2, 40, 33))

ROWS, QUICK_ROWS = 30522, 1000
POSITIONS = 512
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


def draw_norm(width: int) -> Norm:
    """A LayerNorm with every weight and bias its own."""
    rng = np.random.default_rng(width)
    weight, bias = aligned((width,), np.float32), aligned((width,), np.float32)
    weight[:] = rng.normal(1, 0.1, width)
    bias[:] = rng.normal(0, 0.1, width)
    return Norm(weight, bias)


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
