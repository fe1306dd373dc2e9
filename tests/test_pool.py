"""The pool of memory for results: what it gives out, what it keeps, what it leaves as it was."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import io
import pickle
import random
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import resident
from numpy.typing import NDArray
from reference import BFLOAT16

from bertinput import BertEmbeddings, bert_embeddings, pool

try:
    from numpy._core import _multiarray_umath as umath
    from numpy._core.multiarray import get_handler_name
except ImportError:  # NumPy 1
    from numpy.core import _multiarray_umath as umath
    from numpy.core.multiarray import get_handler_name

Array = NDArray[Any]
Python = Callable[..., str]

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="no fork here")

MIB = 1 << 20
DEFAULT = 256 * MIB
OURS, NUMPYS = "bertinput", get_handler_name()

ROWS = np.repeat(np.arange(256, dtype=np.float32), 1024).reshape(256, 1024)  # of 4 KiB
LAYER = BertEmbeddings(ROWS, layer_norm=(np.zeros(1024), np.arange(1024), 1e-12))


def result(value: int, nbytes: int = 2 * MIB) -> Array:
    """A new result of so many bytes, each element of which is `value`."""
    return LAYER.sum(np.full(nbytes // 4096, value, np.uint8), num_threads=1)


def place(array: Array) -> int:
    """Where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


def about(nbytes: int) -> Any:
    """So many bytes held: blocks are a little larger than the results in them."""
    return pytest.approx(nbytes + MIB // 16, abs=MIB // 16)


def elsewhere(python: Python, code: str) -> str:
    """Run code that knows this module's names in a process of its own."""
    return python(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_pool import *
{code}""")


@pytest.fixture(autouse=True)
def pool_as_at_first() -> Iterator[None]:
    """Before and after each test the pool is empty and has its first limit."""
    pool.set_limit(DEFAULT)
    pool.trim()
    yield
    gc.collect()
    pool.set_limit(DEFAULT)
    pool.trim()
    assert pool.held() == 0


# Memory that is used again


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
no_bfloat16 = pytest.mark.skipif(BFLOAT16 is None, reason="bfloat16 results need ml_dtypes")
KINDS = [pytest.param(kind, marks=no_bfloat16) if kind == "bfloat16" else kind for kind in RESULTS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_results_memory_serves_the_next(kind: str) -> None:
    """Every kind of result; nothing of what the memory held before shows through."""
    ids = np.arange(2048).reshape(-1, 1) % 256
    first = RESULTS[kind](ids)
    expected, where = first.copy(), place(first)
    assert get_handler_name(first) == OURS
    first.view(np.uint8).fill(0xFF)  # NaN
    assert pool.held() == 0  # in use, the memory is the caller's
    del first
    assert pool.held() == about(expected.nbytes)
    again = RESULTS[kind](ids)
    assert place(again) == where and pool.held() == 0
    assert np.array_equal(again, expected)


def test_a_block_serves_similar_sizes_alone() -> None:
    """No more than half of it lies idle; of two that would do, the smaller is taken."""
    where = place(result(1, 8 * MIB))
    smaller = result(2, 5 * MIB)
    assert place(smaller) == where and (smaller == 2).all()
    del smaller
    other, larger = result(3, 3 * MIB), result(4, 9 * MIB)
    assert where not in (place(other), place(larger))
    assert pool.held() == about(8 * MIB)
    elsewhere = place(larger)
    del larger
    assert place(result(5, 8 * MIB)) == where
    assert place(result(6, 9 * MIB)) == elsewhere


def test_many_results_at_once() -> None:
    for _ in range(2):
        many = [result(k, MIB) for k in range(100)]
        assert len({place(array) for array in many}) == 100
        assert all((array == k).all() for k, array in enumerate(many))
        del many
        assert MIB <= pool.held() <= 107 * MIB


def test_a_loop_takes_the_memory_of_one_result(peak_growth: Callable[..., int]) -> None:
    def loop() -> None:
        for k in range(100):
            assert result(k, 4 * MIB)[-1, -1] == k

    assert peak_growth(loop) < 12 * MIB
    assert pool.held() == about(4 * MIB)


def test_a_call_that_fails_gives_the_memory_back() -> None:
    ids = np.zeros(1024, np.int64)
    ids[-1] = 256
    for _ in range(3):
        with pytest.raises(IndexError, match="out of range"):
            LAYER(ids)
        assert pool.held() == about(4 * MIB)


# Memory that is in use


class Subclass(np.ndarray):
    """An array by another name."""


class Interface:
    """Something that says where an array lies, and keeps it."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


VIEWS: dict[str, Callable[[Array], Any]] = {
    "slice": lambda array: array[3:-3],
    "steps": lambda array: array[::-7, ::5],
    "row": lambda array: array[-1],
    "reshape": lambda array: array.reshape(-1),
    "transposed": lambda array: array.T,
    "view": lambda array: array.view(),
    "another type": lambda array: array.view(np.uint8),
    "subclass": lambda array: array.view(Subclass),
    "broadcast": lambda array: np.broadcast_to(array[:9], (2, 9, 1024)),
    "strided": lambda array: np.lib.stride_tricks.as_strided(array[9], (4, 4), (0, 4)),
    "iterator": lambda array: array.flat,
    "memoryview": memoryview,
    "part of a memoryview": lambda array: memoryview(array).cast("B")[5000:],
    "buffer": lambda array: np.frombuffer(array, np.float32),
    "PickleBuffer": pickle.PickleBuffer,
    "ctypes": lambda array: (ctypes.c_char * array.nbytes).from_buffer(array),
    "array interface": lambda array: np.asarray(Interface(array)),
    "DLPack": np.from_dlpack,
}


@pytest.mark.parametrize("how", VIEWS)
def test_memory_is_not_given_out_while_anything_refers_to_it(how: str) -> None:
    array = result(7)
    where = place(array)
    view = VIEWS[how](array)
    shown = np.array(view).tobytes()
    del array
    gc.collect()
    assert pool.held() == 0
    for k in range(8, 11):  # kept and dropped, of this and of a similar size
        others = [result(k), result(k), result(k, 3 * MIB)]
        assert where not in [place(other) for other in others]
        del others
    assert np.array(view).tobytes() == shown
    before = pool.held()
    del view
    gc.collect()
    assert pool.held() - before == about(2 * MIB)


def test_a_result_is_an_array_like_any_other() -> None:
    array = result(3)
    flags = array.flags
    assert type(array) is np.ndarray and array.base is None and flags.owndata
    assert flags.c_contiguous and flags.aligned and flags.writeable and not flags.writebackifcopy
    assert place(array) % 64 == 0
    expected = np.full((512, 1024), 3, np.float32)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert np.array_equal(pickle.loads(pickle.dumps(array, protocol)), expected)
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    assert np.array_equal(np.load(file), expected)
    for copied in (array.copy(), array.astype(np.float64), array + 0, np.concatenate([array])):
        assert np.array_equal(copied, expected) and get_handler_name(copied) == NUMPYS
    array *= 2
    array[1:] -= array[:-1]
    assert (array[0] == 6).all() and (array[1:] == 0).all()


def test_a_result_can_be_resized_in_place() -> None:
    """Larger, smaller, small, empty; the memory on the way is given back and stays the pool's."""
    result(9, 12 * MIB).fill(-1)  # what it leaves behind must not show
    array = result(3)
    with_view = array[:1]
    with pytest.raises(ValueError, match="resize"):
        array.resize(1024, 1024)
    del with_view
    for rows, filled in ((2048, 512), (2000, 512), (600, 512), (500, 500), (9, 9), (300, 9)):
        array.resize((rows, 1024), refcheck=False)
        assert array.flags.owndata and get_handler_name(array) == OURS
        assert (array[:filled] == 3).all() and (array[filled:] == 0).all()
    array.resize((0, 1024), refcheck=False)
    array.resize((1024, 1024), refcheck=False)
    assert (array == 0).all()
    others = [result(k, size * MIB) for k, size in enumerate((12, 8, 4, 2, 1))]
    assert (array == 0).all()
    assert all((other == k).all() for k, other in enumerate(others))


def test_tracemalloc_sees_results_and_not_what_is_held() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2):  # from the system, then from the pool
            array = result(1, 8 * MIB)
            assert 8 * MIB <= tracemalloc.get_traced_memory()[0] - before < 9 * MIB
            del array
            assert tracemalloc.get_traced_memory()[0] - before < MIB
    finally:
        tracemalloc.stop()


# What takes no memory from it


def test_results_below_one_mebibyte_are_numpys() -> None:
    small = result(1, MIB - 4096)
    assert get_handler_name(small) == NUMPYS
    del small
    assert pool.held() == 0
    large = result(2, MIB)
    assert get_handler_name(large) == OURS
    del large
    held = pool.held()
    small = result(3, MIB - 4096)
    assert get_handler_name(small) == NUMPYS and pool.held() == held
    del small
    assert pool.held() == held


@pytest.mark.parametrize("kind", [kind for kind in RESULTS if kind != "bfloat16"])
def test_nothing_is_taken_for_a_given_out(kind: str) -> None:
    ids = np.arange(1024)[:, None] % 256
    expected = RESULTS[kind](ids).copy()
    held = pool.held()
    out = np.empty_like(expected)
    options = {"out": out, "dtype": out.dtype}
    if kind == "function":
        bert_embeddings(ids, None, ROWS, ROWS[:1], ROWS[:1], **options)
    else:
        stage = getattr(LAYER, kind if kind in ("sum", "inputs_embeds") else "__call__")
        assert stage(ids, **options) is out
    assert np.array_equal(out, expected) and get_handler_name(out) == NUMPYS
    assert pool.held() == held
    pool.trim()
    LAYER.sum(ids, out=LAYER.sum(ids, out=np.empty((1024, 1, 1024), np.float32)))
    assert pool.held() == 0


# The limit


def test_the_limit_holds_after_every_step() -> None:
    """Results of all sizes made and dropped in any order, while the limit changes."""
    chance = random.Random(1)
    live: deque[tuple[int, Array]] = deque()
    most = 0
    for step in range(600):
        what = chance.random()
        if what < 0.45 and len(live) < 12:
            live.append((step % 256, result(step % 256, chance.randrange(256, 1500) * 4096)))
        elif what < 0.9 and live:
            live.rotate(chance.randrange(12))
            value, array = live.pop()
            assert (array == value).all()
            del array
        elif what < 0.97:
            pool.set_limit(chance.choice([0, 1, 2 * MIB, 3 * MIB + 12345, 10 * MIB, 40 * MIB]))
        else:
            held = pool.held()
            assert pool.trim() == held and pool.held() == 0
        assert 0 <= pool.held() <= pool.limit()
        most = max(most, pool.held())
    assert most > 10 * MIB


def test_zero_turns_it_off() -> None:
    pool.set_limit(0)
    assert pool.limit() == 0
    array = result(1)
    assert get_handler_name(array) == NUMPYS
    del array
    assert pool.held() == 0


def test_a_result_larger_than_the_limit_is_not_kept() -> None:
    pool.set_limit(4 * MIB)
    for nbytes in (5 * MIB, 4 * MIB + 4096, 4 * MIB):  # beside the last one its size is noted
        assert (result(1, nbytes) == 1).all()
        assert pool.held() == 0
    assert (result(2, 3 * MIB) == 2).all()
    assert pool.held() == about(3 * MIB)


def test_a_limit_that_is_lowered_counts_for_results_in_use() -> None:
    array = result(1, 8 * MIB)
    pool.set_limit(4 * MIB)
    assert (array == 1).all()
    del array
    assert pool.held() == 0


def test_a_lower_limit_trims_at_once_and_no_further() -> None:
    many = [result(k) for k in range(8)]
    del many
    assert pool.held() > 16 * MIB
    pool.set_limit(9 * MIB)
    assert pool.held() == about(8 * MIB + MIB // 4)
    pool.set_limit(DEFAULT)
    assert pool.held() == about(8 * MIB + MIB // 4)
    pool.set_limit(1)
    assert pool.held() == 0


@needs_linux
def test_memory_goes_back_to_the_system() -> None:
    """By trim, by a lower limit, and at once what exceeds the limit when it is given back."""
    for how in ("trim", "lower limit", "limit lowered before"):
        pool.set_limit(DEFAULT)
        many = [result(k, 8 * MIB) for k in range(8)]
        full = resident("VmRSS")
        if how == "limit lowered before":
            pool.set_limit(MIB)
        del many
        held = pool.held()
        if how != "limit lowered before":
            assert 64 * MIB < held < 65 * MIB
            assert resident("VmRSS") > full - 8 * MIB
        if how == "trim":
            assert pool.trim() == held
        else:
            pool.set_limit(MIB)
        assert pool.held() == 0
        assert resident("VmRSS") < full - 56 * MIB


class Number:
    """An integer by its protocol."""

    def __index__(self) -> int:
        return 5 * MIB


@pytest.mark.parametrize(
    ("nbytes", "limit"),
    [
        (np.int64(3 * MIB), 3 * MIB),
        (np.uint8(7), 7),
        (Number(), 5 * MIB),
        (2**63 - 1, 2**63 - 1),
        (2**64, None),
        (10**40, None),
    ],
)
def test_limits(nbytes: Any, limit: int | None) -> None:
    """An integer of any type; one that no memory could reach means as much."""
    pool.set_limit(nbytes)
    assert type(pool.limit()) is int
    assert pool.limit() == limit if limit is not None else pool.limit() > 2**60
    array = result(1)
    del array
    assert pool.held() == (about(2 * MIB) if pool.limit() > 2 * MIB else 0)


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (True, TypeError),
        (np.True_, TypeError),
        (1.0, TypeError),
        (np.float64(1), TypeError),
        (Decimal(1), TypeError),
        ("1", TypeError),
        (None, TypeError),
        ([1], TypeError),
        (np.array([1, 2]), TypeError),
        (-1, ValueError),
        (np.int8(-1), ValueError),
        (-(10**40), ValueError),
    ],
    ids=repr,
)
def test_what_is_no_limit(nbytes: Any, error: type[Exception]) -> None:
    pool.set_limit(4 * MIB)
    result(1)
    held = pool.held()
    with pytest.raises(error):
        pool.set_limit(nbytes)
    assert pool.limit() == 4 * MIB
    assert pool.held() == held > 0


# NumPy's allocator


class Allocator(ctypes.Structure):
    """NumPy's PyDataMemAllocator; functions called through it run without the GIL."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("malloc", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
        (
            "calloc",
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
        ),
        (
            "realloc",
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        ),
        ("free", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
    )


class Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("allocator", Allocator),
    )


class Fields(ctypes.Structure):
    """What an array is made of, up to its handler (PyArrayObject_fields)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("nd", ctypes.c_int),
        ("dimensions", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("descr", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("weakreflist", ctypes.c_void_p),
        ("buffer_info", ctypes.c_void_p),
        ("handler", ctypes.py_object),
    )


def in_capsule(capsule: object, name: bytes | None) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, name))


def pool_allocator() -> Allocator:
    """The pool's own functions, as NumPy finds them in an array."""
    array = result(0)
    fields = Fields.from_address(id(array) + object.__basicsize__)
    assert fields.data == place(array)
    handler = Handler.from_address(in_capsule(fields.handler, b"mem_handler"))
    assert handler.name.decode() == OURS
    allocator: Allocator = handler.allocator
    return allocator


FAULTS: dict[str, Callable[[], Any]] = {
    "bad id": lambda: LAYER(np.full(1024, 256)),
    "bad dtype": lambda: LAYER(np.zeros(1024, np.uint8), dtype=int),
    "bad out": lambda: LAYER(np.zeros(1024, np.uint8), out=np.empty((1024, 3), np.float32)),
    "no memory": lambda: LAYER(np.broadcast_to(np.uint8(0), 2**42)),
    "no such size": lambda: LAYER(np.broadcast_to(np.uint8(0), 2**60)),
}


def use_results() -> None:
    """Take results of every kind, and fail in every way; NumPy's allocator stays its own."""
    assert get_handler_name() == NUMPYS
    for ids in (np.zeros((1, 1), np.uint8), np.zeros((1024, 1), np.uint8)):
        for kind in RESULTS:
            if kind != "bfloat16" or BFLOAT16 is not None:
                RESULTS[kind](ids)
                assert get_handler_name() == NUMPYS
    for limit in (DEFAULT, 2**62):  # what the pool may not hold is not asked from it
        pool.set_limit(limit)
        for name, fault in FAULTS.items():
            with pytest.raises((IndexError, TypeError, ValueError, MemoryError)) as caught:
                fault()
            assert (caught.type is IndexError) == (name == "bad id")
            assert issubclass(caught.type, MemoryError) or name != "no memory"
            assert get_handler_name() == NUMPYS
            assert get_handler_name(np.empty(2 * MIB)) == NUMPYS
            assert get_handler_name(result(1)) == OURS


@pytest.mark.parametrize("where", ["here", "thread", "empty context", "copied context"])
def test_numpys_allocator_is_in_place_after_each_call(where: str) -> None:
    if where == "thread":
        with ThreadPoolExecutor(1) as threads:
            threads.submit(use_results).result()
    elif where == "empty context":
        contextvars.Context().run(use_results)
    elif where == "copied context":
        contextvars.copy_context().run(use_results)
    else:
        use_results()
    assert get_handler_name() == NUMPYS


KEPT = []  # handlers, which must outlive the arrays


def test_another_allocator_is_in_place_after_each_call() -> None:
    """That of somebody who gave NumPy one too (NEP 49)."""
    table = ctypes.cast(in_capsule(umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[304])
    get_handler = ctypes.PYFUNCTYPE(ctypes.py_object)(table[305])
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    handler = Handler()
    numpys = Handler.from_address(in_capsule(get_handler(), b"mem_handler"))
    ctypes.pointer(handler)[0] = numpys
    handler.name = b"another"
    name = ctypes.create_string_buffer(b"mem_handler")
    KEPT.append((handler, name))

    def call() -> None:
        before = set_handler(capsule(ctypes.addressof(handler), name, None))
        try:
            for _ in range(2):
                assert get_handler_name(result(1)) == OURS
                assert get_handler_name(result(1, 4096)) == "another"
                for fault in FAULTS.values():
                    with pytest.raises((IndexError, TypeError, ValueError, MemoryError)):
                        fault()
                    assert get_handler_name() == "another"
        finally:
            set_handler(before)

    contextvars.copy_context().run(call)
    assert get_handler_name() == NUMPYS


def test_the_allocators_own_functions() -> None:
    """As NumPy may call them, though it seldom does: zeros, another size, nothing, too much."""
    pooled = pool_allocator()
    pool.trim()
    memory = pooled.malloc(None, 3 * MIB)
    assert memory % 64 == 0
    ctypes.memset(memory, 0xAB, 3 * MIB)
    assert pooled.realloc(None, memory, 2 * MIB) == memory
    moved = pooled.realloc(None, memory, 9 * MIB)
    assert ctypes.string_at(moved, 2 * MIB) == b"\xab" * 2 * MIB
    ctypes.memset(moved, 0xCD, 9 * MIB)
    small = pooled.realloc(None, moved, 1000)
    assert ctypes.string_at(small, 1000) == b"\xcd" * 1000
    zeros = pooled.calloc(None, 3, 3 * MIB)
    assert zeros == moved  # dirty
    assert ctypes.string_at(zeros, 9 * MIB) == bytes(9 * MIB)
    for size in (2**64 - 1, 2**64 - 64, 2**63, 2**50):
        assert pooled.malloc(None, size) is None
        assert pooled.realloc(None, zeros, size) is None
    assert pooled.calloc(None, 2**62, 8) is None
    assert ctypes.string_at(zeros, 9 * MIB) == bytes(9 * MIB)  # as it was before the failures
    first = pooled.realloc(None, None, MIB)
    pooled.free(None, None, 0)
    pool.trim()
    for given in (small, zeros, first):
        pooled.free(None, given, 0)
    assert 10 * MIB < pool.held() < 11 * MIB


# Threads


def test_results_in_many_threads() -> None:
    """Made, checked, kept a while, passed on and dropped, while the pool is full and trimmed."""
    pool.set_limit(8 * MIB)
    passed: deque[tuple[int, Array]] = deque()

    def work(number: int) -> None:
        chance, kept = random.Random(number), deque[tuple[int, Array]]()
        for turn in range(60):
            value = number * 32 + turn % 32
            array = result(value, chance.randrange(256, 640) * 4096)
            assert (array == value).all()
            kept.append((value, array))
            del array
            if len(kept) > 2:
                passed.append(kept.popleft())
            if len(passed) > 8:
                value, array = passed.popleft()
                assert (array == value).all()
                del array
            if turn % 20 == number:
                pool.trim()
            assert pool.held() <= 8 * MIB

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(8)]:
            done.result()
    assert all((array == value).all() for value, array in passed)


def test_the_allocators_own_functions_in_many_threads() -> None:
    """Without the GIL, so that threads are inside the pool at once."""
    pooled = pool_allocator()
    pool.trim()
    pool.set_limit(4 * MIB)
    begun = threading.Barrier(4)

    def word(address: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(address)

    def work(number: int) -> None:
        chance = random.Random(number)
        kept = deque[tuple[int, int, int]]()
        begun.wait()
        for turn in range(4000):
            size, tag = chance.randrange(1000, MIB), number << 32 | turn
            memory = pooled.malloc(None, size)
            word(memory).value = word(memory + size - 8).value = tag
            kept.append((memory, size, tag))
            if len(kept) > 3 or turn >= 3990:
                memory, size, tag = kept.popleft()
                assert word(memory).value == word(memory + size - 8).value == tag
                pooled.free(None, memory, size)
            if turn % 500 == 0:
                pool.trim()
        while kept:
            pooled.free(None, kept.popleft()[0], 0)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result()
    held = pool.held()
    assert 0 < held <= 4 * MIB
    assert pool.trim() == held
    assert pool.held() == 0


def test_trim_leaves_the_limit_that_another_thread_sets() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            pool.trim()

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=work) for _ in range(2)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for turn in range(2000):
            limit = turn % 7 * MIB
            pool.set_limit(limit)
            time.sleep(0)
            assert pool.limit() == limit
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()


# Fork and exit

FORK = """
import os, signal, traceback, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tried

def forked(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@needs_fork
def test_a_childs_pool_is_its_own(fresh_python: Python) -> None:
    elsewhere(
        fresh_python,
        FORK
        + """
kept = result(1)
for nbytes in (2 * MIB, 4 * MIB):
    result(2, nbytes)
held = pool.held()
assert held > 4 * MIB
pid = os.getpid()

def work():
    assert pool.held() == held and pool.limit() == DEFAULT
    assert (kept == 1).all()
    array = result(3)
    assert (array == 3).all() and pool.held() < held
    kept.fill(9)
    if os.getppid() == pid:
        forked(work_of_grandchild)
    assert (array == 3).all() and (kept == 9).all()
    del array
    assert pool.held() == held
    assert pool.trim() == held and pool.held() == 0
    pool.set_limit(MIB)
    assert (result(4, 4 * MIB) == 4).all()

def work_of_grandchild():
    assert (kept == 9).all()
    assert pool.trim() > 0
    assert (result(5) == 5).all()

for _ in range(2):
    forked(work)
    assert pool.held() == held and pool.limit() == DEFAULT
    assert (kept == 1).all()
array = result(6)
assert (array == 6).all() and pool.held() < held
""",
    )


@needs_fork
def test_forks_while_threads_take_results(fresh_python: Python) -> None:
    elsewhere(
        fresh_python,
        FORK
        + """
stop = threading.Event()

def loop(number):
    while not stop.is_set():
        array = result(number)
        other = result(number, 3 * MIB)
        assert (array == number).all()
        pool.trim()

def work():
    begun = time.monotonic()
    kept = [result(50 + k) for k in range(3)]
    with ThreadPoolExecutor(1) as threads:
        assert (threads.submit(result, 60).result() == 60).all()
    assert all((array == 50 + k).all() for k, array in enumerate(kept))
    del kept
    assert pool.held() > 0
    pool.trim()
    assert pool.held() == 0
    pool.set_limit(0)
    assert (result(61) == 61).all()

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
try:
    for _ in range(12):
        forked(work)
finally:
    stop.set()
    for thread in threads:
        thread.join()
""",
    )


def test_results_that_live_until_the_end(fresh_python: Python) -> None:
    """An interpreter ends as it should, whatever still refers to results."""
    printed = elsewhere(
        fresh_python,
        """
import atexit, builtins

class Keeper:
    def __init__(self, value):
        self.array, self.me = result(value), self
    def __del__(self):
        assert result(1, 2 * MIB)[0, 0] == 1

builtins.kept = result(1)
sys.kept = np.asarray(memoryview(result(2)))
array = result(3)
cycle = Keeper(4)
local = threading.local()
local.kept = Keeper(5)
variable = contextvars.ContextVar("variable")
variable.set(Keeper(6))
atexit.register(lambda: print(int((result(7) == 7).all()), int((array == 3).all())))

def loop():
    while True:
        result(8)
        LAYER(np.zeros(8192, int), num_threads=2)

for _ in range(2):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.1)
""",
    )
    assert printed.split() == ["1", "1"]


@needs_linux
def test_a_system_without_memory(fresh_python: Python) -> None:
    """An error, after which all is as before; what the pool held still serves."""
    elsewhere(
        fresh_python,
        """
import resource
result(1, 32 * MIB)
held = pool.held()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 16 * MIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for _ in range(3):
    try:
        result(2, 128 * MIB)
    except MemoryError:
        assert get_handler_name() == NUMPYS
    else:
        raise AssertionError("there was memory")
    assert (result(3, 32 * MIB) == 3).all()
    assert pool.held() == held
""",
    )
