"""The pool of memory for results: what it gives out, what it keeps, and what it leaves alone."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import io
import itertools
import pickle
import random
import sys
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import resident
from numpy.typing import NDArray
from reference import BFLOAT16

from bertinput import BertEmbeddings, bert_embeddings, pool

try:
    from numpy._core.multiarray import get_handler_name
except ImportError:
    from numpy.core.multiarray import get_handler_name  # NumPy 1

Array = NDArray[Any]
Python = Callable[..., str]

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
needs_fork = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork here")

MIB = 1 << 20
DEFAULT = 256 * MIB
SPARE = MIB // 8  # more than a block is larger than the result in it
OURS, NUMPYS = "bertinput", get_handler_name()

ROWS = np.repeat(np.arange(256, dtype=np.float32), 1024).reshape(256, 1024)  # of 4 KiB
LAYER = BertEmbeddings(ROWS, layer_norm=(np.zeros(1024), np.arange(1024), 1e-12))


def result(value: int, nbytes: int = 2 * MIB) -> Array:
    """A new result of so many bytes, each element of which is `value`."""
    return LAYER.sum(np.full(nbytes // 4096, value, np.uint8), num_threads=1)


def place(array: Array) -> int:
    """Where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


@pytest.fixture(autouse=True)
def fresh_pool() -> Iterator[None]:
    """An empty pool with its first limit, before and after each test."""
    pool.set_limit(DEFAULT)
    pool.trim()
    yield
    gc.collect()
    pool.set_limit(DEFAULT)
    pool.trim()
    assert pool.held() == 0


# Memory used again


def test_a_fresh_process_holds_nothing(fresh_python: Python) -> None:
    printed = fresh_python("""
        from bertinput import pool
        print(pool.limit(), pool.held(), pool.trim())
    """)
    assert printed.split() == [str(DEFAULT), "0", "0"]


RESULTS: dict[str, Callable[[Array], Array]] = {
    "function": lambda ids: bert_embeddings(ids, None, ROWS, ROWS[:1], ROWS[:1]),
    "layer": lambda ids: LAYER(ids),
    "sum": lambda ids: LAYER.sum(ids),
    "inputs_embeds": lambda ids: LAYER.inputs_embeds(ids),
    "float64": lambda ids: LAYER(ids, dtype=np.float64),
    "float16": lambda ids: LAYER(ids, dtype=np.float16),
    "bfloat16": lambda ids: LAYER(ids, dtype="bfloat16"),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.skipif(
                kind == "bfloat16" and BFLOAT16 is None, reason="bfloat16 results need ml_dtypes"
            ),
        )
        for kind in RESULTS
    ],
)
def test_a_dropped_results_memory_serves_the_next_one(kind: str) -> None:
    """Every kind of result; what its memory held before does not show through."""
    ids = np.arange(2048).reshape(-1, 1) % 256
    first = RESULTS[kind](ids)
    expected, where = first.copy(), place(first)
    assert get_handler_name(first) == OURS and get_handler_name(expected) == NUMPYS
    first.view(np.uint8).fill(0xFF)  # NaN
    assert pool.held() == 0  # in use, it is the caller's
    del first
    assert expected.nbytes <= pool.held() < expected.nbytes + SPARE
    again = RESULTS[kind](ids)
    assert place(again) == where
    assert pool.held() == 0
    assert np.array_equal(again, expected)


def test_blocks_serve_similar_sizes_alone() -> None:
    """No more than half of a block lies idle under a result."""
    where = place(result(1, 8 * MIB))
    smaller = result(2, 5 * MIB)
    assert place(smaller) == where and (smaller == 2).all()
    del smaller
    much_smaller, larger = result(3, 3 * MIB), result(4, 9 * MIB)
    assert where not in (place(much_smaller), place(larger))
    assert 8 * MIB <= pool.held() < 8 * MIB + SPARE
    del much_smaller
    assert place(result(5, 3 * MIB)) != where  # of two that would do, the smaller
    assert place(result(6, 7 * MIB)) == where


def test_more_results_than_the_pool_has_places_for() -> None:
    many = [result(k, MIB) for k in range(90)]
    assert len({place(array) for array in many}) == 90
    assert all((array == k).all() for k, array in enumerate(many))
    del many
    assert pool.held() <= 90 * (MIB + SPARE)
    many = [result(k, MIB) for k in range(90)]
    assert all((array == k).all() for k, array in enumerate(many))


def test_a_loop_over_results_takes_no_more_memory(peak_growth: Callable[..., int]) -> None:
    def loop() -> None:
        for k in range(100):
            assert result(k, 4 * MIB)[-1, -1] == k

    assert peak_growth(loop) < 16 * MIB
    assert pool.held() < 4 * MIB + SPARE


def test_a_result_that_ends_in_an_error_gives_its_memory_back() -> None:
    ids = np.zeros(1024, np.int64)
    ids[-1] = 256
    for _ in range(3):
        with pytest.raises(IndexError, match="out of range"):
            LAYER(ids)
        assert 4 * MIB <= pool.held() < 4 * MIB + SPARE


# Memory in use

VIEWS: dict[str, Callable[[Array], Any]] = {
    "slice": lambda array: array[3:-3],
    "steps": lambda array: array[::-7, ::5],
    "one row": lambda array: array[-1],
    "reshape": lambda array: array.reshape(-1),
    "transposed": lambda array: array.T,
    "another type": lambda array: array.view(np.uint8),
    "as it is": lambda array: array.view(),
    "iterator": lambda array: array.flat,
    "subclass": lambda array: array.view(np.matrix) if False else array.view(np.recarray),
    "memoryview": memoryview,
    "part of a memoryview": lambda array: memoryview(array).cast("B")[5000:],
    "buffer": lambda array: np.frombuffer(array, np.float32),
    "interface": lambda array: np.asarray(Interface(array)),
    "DLPack": np.from_dlpack,
    "strided": lambda array: np.lib.stride_tricks.as_strided(array[9], (4, 4), (0, 4)),
    "ctypes": lambda array: (ctypes.c_char * array.nbytes).from_buffer(array),
    "readonly": lambda array: np.broadcast_to(array, (2, *array.shape)),
}


class Interface:
    """Something that only says where an array lies, and keeps it."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def contents(view: Any) -> bytes:
    """All that a view shows."""
    return bytes(view) if isinstance(view, ctypes.Array | memoryview) else np.array(view).tobytes()


@pytest.mark.parametrize("how", VIEWS)
def test_memory_is_not_given_out_while_something_refers_to_it(how: str) -> None:
    array = result(7)
    where = place(array)
    view = VIEWS[how](array)
    before = contents(view)
    del array
    gc.collect()
    assert pool.held() == 0
    others = [result(8), result(9), LAYER(np.zeros(512, np.int8))]
    assert where not in [place(other) for other in others]
    del others
    assert where not in {place(result(k)) for k in range(10, 13)}
    assert contents(view) == before and np.frombuffer(before, np.float32).min() == 7
    del view
    gc.collect()
    assert where in [place(array) for array in [result(13) for _ in range(1)] + drawn(where)]


def drawn(where: int) -> list[Array]:
    """Results held at once, until one lies there."""
    held = [result(14)]
    while place(held[-1]) != where and len(held) < 10:
        held.append(result(14))
    return held
