"""Every float16 and bfloat16 value through the kernels, both ways."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from bertinput import bert_embeddings

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 results need ml_dtypes")

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def through(table: NDArray, dtype: DTypeLike, width: int) -> NDArray:
    """The table's values, read and written once by the kernel: what is added is -0.0."""
    rows = table.reshape(-1, width)
    nothing = np.full((1, width), -0.0, dtype=table.dtype)
    ids = np.arange(len(rows))
    zeros = np.zeros_like(ids)
    result = bert_embeddings(ids, zeros, rows, nothing, nothing, position_ids=zeros, dtype=dtype)
    return result.reshape(table.shape)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 64, 4096])
def test_every_value_is_read_exactly(half: np.dtype, wide: type, width: int) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(half)
    with np.errstate(invalid="ignore"):
        expected = values.astype(wide)
    result = through(values, wide, width)
    numbers = ~np.isnan(expected)
    bits = np.uint32 if wide is np.float32 else np.uint64
    assert np.array_equal(np.isnan(result), ~numbers)
    assert np.array_equal(result[numbers].view(bits), expected[numbers].view(bits))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@np.errstate(over="ignore", invalid="ignore")
def test_every_value_and_every_midpoint_is_rounded_to_nearest_even(
    half: np.dtype, wide: type
) -> None:
    finite = np.arange(1 << 16, dtype=np.uint16).view(half).astype(np.float64)
    finite = np.unique(finite[np.isfinite(finite)])
    most = finite[-1]
    beyond = most + (most - finite[-2])  # the value that would come next, and rounds to infinity
    edges = np.concatenate([[-beyond], finite, [beyond]])
    low, high = edges[:-1].astype(wide), edges[1:].astype(wide)
    middle = (edges[:-1] + edges[1:]) / 2  # exact in float32 too
    middle = middle.astype(wide)
    values = np.concatenate(
        [finite.astype(wide), middle, np.nextafter(middle, low), np.nextafter(middle, high)]
    )

    result = through(values, half, 1).astype(np.float64)

    exact = values.astype(np.float64)
    place = np.searchsorted(edges, exact, side="right") - 1
    below, above = edges[place], edges[np.minimum(place + 1, len(edges) - 1)]
    # odd and even alternate; zero and what lies past the largest value are even
    odd_below = ((place - np.searchsorted(edges, 0.0)) & 1).astype(bool)
    nearer_above = exact - below > above - exact
    halfway = exact - below == above - exact
    expected = np.where(nearer_above | (halfway & odd_below), above, below)
    expected = np.where(np.abs(expected) == beyond, np.copysign(np.inf, expected), expected)
    assert np.array_equal(result, expected)
