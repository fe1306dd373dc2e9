"""`bert_embeddings` against the contract: its values bit for bit, its errors word for word."""

from __future__ import annotations

import array
import ctypes
import importlib.metadata
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    BFLOAT16,
    FORMATS,
    Array,
    Quantized,
    assert_same_bits,
    decoded,
    is_bfloat16,
    reference_sum,
    round_once,
    rounded,
)

from bertinput import QuantizedTable, bert_embeddings

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_bfloat16 = pytest.mark.skipif(BFLOAT16 is None, reason="ml_dtypes is not installed")
needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, sparse files")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")

FLOATS = [
    "float64",
    "float32",
    "float16",
    pytest.param("bfloat16", marks=needs_bfloat16),
]
FLOAT_NAMES = ["float64", "float32", "float16"] + ([] if BFLOAT16 is None else ["bfloat16"])
WIDTHS = [1, 2, 3, 17, 768, 1000]
ID_CODES = list("bBhHiIlLqQ")
TABLES = ["token_embeddings", "position_embeddings", "segment_embeddings"]
IDS = ["token_ids", "segment_ids", "position_ids"]

Growth = Callable[[Callable[[], Any]], int]
Python = Callable[..., str]
Arguments = dict[str, Any]


# Making arguments


def special_bits(name: str) -> list[int]:
    """Bit patterns of a float type where something changes, positive ones."""
    digits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}[name]
    width = np.dtype(bits_of(name)).itemsize * 8
    infinity = ((1 << (width - digits)) - 1) << (digits - 1)
    one = (infinity >> digits) << (digits - 1)
    smallest_normal = 1 << (digits - 1)
    quiet, signalling = infinity | 1 << (digits - 2), infinity | 1
    patterns = [0, 1, 2, smallest_normal - 1, smallest_normal, smallest_normal + 1]
    patterns += [one, one + 1, one - 1, infinity - 1, infinity - 2, infinity, quiet, signalling]
    return patterns


def bits_of(name: str) -> str:
    """The unsigned type as wide as a float type."""
    return {"float64": "u8", "float32": "u4", "float16": "u2", "bfloat16": "u2"}[name]


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name."""
    if name != "bfloat16":
        return np.dtype(name)
    assert BFLOAT16 is not None
    return BFLOAT16


def specials(name: str) -> Array:
    """Zeros, subnormals, limits, infinities and NaNs of a float type, of both signs."""
    unsigned = np.dtype(bits_of(name))
    sign = 1 << (unsigned.itemsize * 8 - 1)
    positive = special_bits(name)
    negative = [pattern | sign for pattern in positive]
    return np.array(positive + negative, unsigned).view(dtype_of(name))


def table_of(
    rng: np.random.Generator, rows: int, width: int, name: str = "float64", wild: float = 0.0
) -> Any:
    """A random table; `wild` is the share of its elements with random bits or special values."""
    shape = (rows, width)
    if name.startswith("quantized"):
        dtype = np.dtype(name.removeprefix("quantized "))
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
        scale = rng.standard_normal(rows).astype(np.float32) * np.float32(0.01)
        zero = rng.integers(limits.min, limits.max, rows, dtype=dtype, endpoint=True)
        per_row = [bool(b) for b in rng.integers(0, 2, 2)]
        return Quantized(
            values,
            scale if per_row[0] else np.float32(rng.standard_normal()),
            zero if per_row[1] else [None, 7][int(rng.integers(2))],
        )
    dtype = dtype_of(name)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    values = round_once(rng.standard_normal(shape), dtype)
    if wild:
        unsigned = np.dtype(bits_of(name))
        random = rng.integers(0, np.iinfo(unsigned).max, shape, dtype=unsigned, endpoint=True)
        choice = rng.random(shape)
        values = np.where(choice < wild / 2, random.view(dtype), values)
        values = np.where(choice > 1 - wild / 2, rng.choice(specials(name), shape), values)
    assert values.dtype == dtype
    return values


def given_to_package(table: Any) -> Any:
    """The table as the package takes it."""
    if isinstance(table, Quantized):
        return QuantizedTable(table.values, table.scale, table.zero_point)
    return table


LAYOUTS: dict[str, Callable[[Array], Array]] = {}


def layout(make: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Register a way to hold the same values differently in memory."""
    LAYOUTS[make.__name__] = make
    return make


@layout
def contiguous(values: Array) -> Array:
    return np.array(values, order="C")


@layout
def fortran(values: Array) -> Array:
    return np.array(values, order="F")


@layout
def reversed_axes(values: Array) -> Array:
    flip = (slice(None, None, -1),) * values.ndim
    return np.array(values[flip], order="C")[flip]


@layout
def reversed_rows(values: Array) -> Array:
    return np.array(values[::-1], order="C")[::-1]


@layout
def sliced(values: Array) -> Array:
    larger = np.zeros([2 * n + 1 for n in values.shape], values.dtype)
    inner = larger[(slice(1, None, 2),) * values.ndim]
    inner[...] = values
    return inner


@layout
def padded_rows(values: Array) -> Array:
    larger = np.zeros((*values.shape[:-1], values.shape[-1] + 3), values.dtype)
    inner = larger[..., 1:-2]
    inner[...] = values
    return inner


@layout
def misaligned(values: Array) -> Array:
    inner = np.ndarray(values.shape, values.dtype, bytearray(values.nbytes + 1), offset=1)
    inner[...] = values
    return inner


@layout
def field(values: Array) -> Array:
    records = np.zeros(values.shape, [("tag", "u1"), ("value", values.dtype)])
    records["value"] = values
    return records["value"]


@layout
def row_field(values: Array) -> Array:
    kind = [("tag", "u1"), ("row", values.dtype, values.shape[-1:]), ("rest", "u2")]
    records = np.zeros(values.shape[:-1], kind)
    records["row"] = values
    return records["row"]


@layout
def read_only(values: Array) -> Array:
    frozen = np.array(values)
    frozen.flags.writeable = False
    return frozen


@layout
def swapped(values: Array) -> Array:
    if is_bfloat16(values.dtype):  # knows one byte order only
        return np.array(values)
    return values.astype(values.dtype.newbyteorder("S"))


# Layouts that leave the elements of a row side by side, in native byte order.
ROWS_IN_PLACE = ["contiguous", "reversed_rows", "padded_rows", "misaligned", "row_field"]


def small(**changes: Any) -> Arguments:
    """Valid arguments: ids (2, 4), tables of 23, 11 and 3 rows, width 5."""
    rng = np.random.default_rng(7)
    arguments = {
        "token_ids": np.array([[3, 22, 0, 7], [1, 8, 22, 5]]),
        "segment_ids": np.array([[0, 0, 1, 1], [0, 1, 2, 2]]),
        "token_embeddings": rng.standard_normal((23, 5)),
        "position_embeddings": rng.standard_normal((11, 5)),
        "segment_embeddings": rng.standard_normal((3, 5)),
    }
    return arguments | changes


def check(arguments: Arguments, **options: Any) -> Array:
    """Call the package, hold it to the reference, return the result."""
    ours = {k: given_to_package(v) for k, v in arguments.items()} | options
    result = bert_embeddings(**ours)
    theirs = {k: v for k, v in (arguments | options).items() if k not in ("out", "num_threads")}
    expected = reference_sum(**theirs)
    assert_same_bits(result, expected)
    assert result.flags.c_contiguous
    assert result.flags.writeable
    return result


def says(error: BaseException | pytest.ExceptionInfo[BaseException], *parts: object) -> None:
    """Assert that an error's text holds every part, numbers as whole numbers."""
    text = str(error.value if isinstance(error, pytest.ExceptionInfo) else error)
    for part in parts:
        assert re.search(rf"(?<![\w-]){re.escape(str(part))}(?!\w)", text), (
            f"{part!s} is not in {text!r}"
        )


# The reference itself

ROUNDING_CASES = [0.0, -0.0, np.inf, -np.inf, 5e-324, -2.2e-308, 1.7976931348623157e308]
ROUNDING_CASES += [
    sign * nudge(base * (1 + step / 2**digits) * 2.0**exponent)
    for digits, least, most in FORMATS.values()
    for exponent in (least - digits - 1, least - digits, least - 1, least, 0, most, most + 1)
    for base in (1.0, 2 - 2.0 ** (1 - digits))
    for step in (0, 1, 2, 3)
    for nudge in (float, lambda x: np.nextafter(x, 0), lambda x: np.nextafter(x, np.inf))
    for sign in (1, -1)
]


@pytest.mark.parametrize("name", FORMATS)
def test_reference_rounding_is_exact(name: str) -> None:
    digits, min_exponent, max_exponent = FORMATS[name]
    values = np.array(ROUNDING_CASES)
    values = values[np.isfinite(values)]
    actual = rounded(values, digits, min_exponent, max_exponent)
    for value, result in zip(values.tolist(), actual.tolist(), strict=True):
        exact, unit = abs(Fraction(value)), Fraction(2) ** (min_exponent - digits + 1)
        while exact >= unit * 2**digits:
            unit *= 2
        nearest = round(exact / unit) * unit  # Python rounds a fraction's half to even
        overflows = nearest >= Fraction(2) ** (max_exponent + 1)
        assert abs(result) == (np.inf if overflows else float(nearest))
        assert np.signbit(result) == np.signbit(value)


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_reference_rounding_is_numpys(name: str) -> None:
    values = np.array([*ROUNDING_CASES, np.nan])
    with np.errstate(all="ignore"):
        assert_same_bits(round_once(values, name), values.astype(name))


@needs_bfloat16
def test_reference_rounding_is_that_of_ml_dtypes_from_float32() -> None:
    with np.errstate(all="ignore"):
        values = np.array([*ROUNDING_CASES, np.nan]).astype(np.float32)
        assert_same_bits(round_once(values, BFLOAT16), values.astype(BFLOAT16))


# The seeds' examples

SEED_EXAMPLES = [
    (
        [[0, 1, 2, 3]],
        [[0, 0, 1, 1]],
        [[0.1, 0.2], [0.3, -0.1], [-0.2, 0.4], [0.5, 0]],
        [[0, 0.1], [0.1, 0], [0.2, -0.1], [-0.1, 0.2]],
        [[0.01, 0.02], [-0.03, 0.04]],
        [[[0.11, 0.32], [0.41, -0.08], [-0.03, 0.34], [0.37, 0.24]]],
    ),
    (
        [[1, 0], [2, 1]],
        [[0, 0], [1, 1]],
        [[1, 0, -1], [0.5, 0.5, 0.5], [-0.2, 0.3, 0.4]],
        [[0.1, 0.2, 0.3], [-0.1, 0, 0.1]],
        [[0, 0, 0], [0.2, -0.2, 0.1]],
        [[[0.6, 0.7, 0.8], [0.9, 0, -0.9]], [[0.1, 0.3, 0.8], [0.6, 0.3, 0.7]]],
    ),
    (
        [[0]],
        [[1]],
        [[0.4, -0.5]],
        [[0.1, 0.2]],
        [[0, 0], [-0.2, 0.3]],
        [[[0.3, 0]]],
    ),
]


@pytest.mark.parametrize("as_arrays", [True, False], ids=["arrays", "lists"])
@pytest.mark.parametrize("example", SEED_EXAMPLES, ids=["segments", "batch", "single token"])
def test_seed_examples(example: tuple[Any, ...], as_arrays: bool) -> None:
    *arguments, expected = example
    result = bert_embeddings(*(map(np.array, arguments) if as_arrays else arguments))
    assert result.dtype == np.float64
    assert result.shape == np.shape(expected)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-15)
    t, g, token, position, segment = map(np.array, arguments)
    assert_same_bits(result, token[t] + position[np.arange(t.shape[1])] + segment[g])


def test_seed_sentence_pair() -> None:
    """The worked example: "cat" at position 2 of sentence A, "slept" at position 6, in B."""
    token, position, segment = np.zeros((30522, 4)), np.zeros((512, 4)), np.zeros((2, 4))
    token[4937], token[14195] = [0.12, -0.45, 0.78, 0.33], [-0.31, 0.56, 0.14, -0.27]
    position[2], position[6] = [0.05, 0.11, -0.03, 0.22], [0.18, -0.07, 0.29, 0.03]
    segment[:] = [[0.08, -0.14, 0.06, 0.19], [-0.11, 0.22, -0.09, 0.15]]
    token_ids = [101, 1996, 4937, 2938, 102, 2009, 14195, 102]
    segment_ids = [0, 0, 0, 0, 0, 1, 1, 1]
    result = bert_embeddings(token_ids, segment_ids, token, position, segment)
    assert result.shape == (8, 4)
    np.testing.assert_allclose(result[2], [0.25, -0.48, 0.81, 0.74], rtol=0, atol=1e-15)
    np.testing.assert_allclose(result[6], [-0.24, 0.71, 0.34, -0.09], rtol=0, atol=1e-15)
    # The first [SEP] still belongs to sentence A, the second to B.
    assert_same_bits(result[4], segment[0])
    assert_same_bits(result[7], segment[1])


# The call


def test_parameters_by_name_and_by_position() -> None:
    parameters = inspect.signature(bert_embeddings).parameters
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert {name: p.kind for name, p in parameters.items()} == {
        "token_ids": either,
        "segment_ids": either,
        "token_embeddings": either,
        "position_embeddings": either,
        "segment_embeddings": either,
        "position_ids": keyword,
        "dtype": keyword,
        "out": keyword,
        "num_threads": keyword,
    }
    arguments = small()
    by_name = check(arguments)
    assert_same_bits(bert_embeddings(*arguments.values()), by_name)
    first, *rest = arguments
    mixed = bert_embeddings(arguments[first], **{name: arguments[name] for name in rest})
    assert_same_bits(mixed, by_name)


def test_parameters_missing_surplus_or_unknown() -> None:
    arguments = small()
    values = list(arguments.values())
    with pytest.raises(TypeError):
        bert_embeddings(*values, arguments["token_ids"])
    with pytest.raises(TypeError):
        bert_embeddings(*values[:4])
    with pytest.raises(TypeError):
        bert_embeddings(*values, scale=2)


def test_inputs_are_left_alone() -> None:
    arguments = small(position_ids=np.array([[4, 3, 2, 1]]))
    before = {name: np.array(value) for name, value in arguments.items()}
    check(arguments)
    for name, value in before.items():
        assert_same_bits(arguments[name], value)


def test_references_are_given_back() -> None:
    """Neither a call nor an error keeps or loses a reference."""
    out = np.empty((2, 4, 5), np.float32)
    arguments = small(position_ids=np.zeros((2, 4), int))
    dtype = np.dtype(np.float32)
    objects = [*arguments.values(), out, dtype]
    too_large = np.lib.stride_tricks.as_strided(np.zeros(1, "i1"), (2**40, 2**20), (0, 0))

    def counts() -> list[int]:
        return [sys.getrefcount(x) for x in objects]

    before = counts()
    for _ in range(50):
        bert_embeddings(**arguments, dtype=dtype)
        bert_embeddings(**arguments, dtype=dtype, out=out)
        for changes in (
            {"token_ids": [[99]]},
            {"position_ids": [0.5]},
            {"segment_ids": np.zeros(3, int)},
            {"out": out[:1]},
            {"token_ids": too_large, "segment_ids": None, "position_ids": [0]},
        ):
            with pytest.raises((IndexError, TypeError, ValueError, MemoryError)):
                bert_embeddings(**{"out": None, "dtype": dtype} | arguments | changes)
    assert counts() == before


def test_summed_not_concatenated() -> None:
    result = check(small())
    assert result.shape == (2, 4, 5)


@pytest.mark.parametrize("tokens", [3, 2000])  # a few bytes, and several MiB
def test_results_are_new_and_stay(tokens: int) -> None:
    rng = np.random.default_rng(3)
    arguments = {
        "token_ids": rng.integers(0, 50, (2, tokens)),
        "segment_ids": None,
        "token_embeddings": rng.standard_normal((50, 300)),
        "position_embeddings": rng.standard_normal((2000, 300)),
        "segment_embeddings": rng.standard_normal((1, 300)),
    }
    first = bert_embeddings(**arguments)
    copy = first.copy()
    view = bert_embeddings(**arguments)[1:, ::2]  # outlives its array
    view_copy = view.copy()
    for shift in (1, 2, 3):
        other = check(arguments | {"token_ids": (arguments["token_ids"] + shift) % 50})
        assert not np.shares_memory(other, first)
        assert not np.shares_memory(other, view)
        other.fill(np.nan)
    assert_same_bits(first, copy)
    assert_same_bits(np.array(view), view_copy)


# Ids


@pytest.mark.parametrize("order", ["=", "S"], ids=["native", "swapped"])
@pytest.mark.parametrize("code", ID_CODES)
def test_ids_of_every_integer_dtype(code: str, order: Any) -> None:
    dtype = np.dtype(code).newbyteorder(order)
    arguments = small(position_ids=[[10, 0, 9, 1], [2, 2, 5, 6]])
    for name in IDS:
        check(arguments | {name: np.array(arguments[name]).astype(dtype)})
    check(arguments | {name: np.array(arguments[name]).astype(dtype) for name in IDS})


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("leading", range(6))
def test_ids_of_every_layout(leading: int, how: str) -> None:
    rng = np.random.default_rng(leading)
    shape = (*(2, 1, 3, 2, 2)[:leading], 4)
    for code in "qiH":
        arguments = small()
        arguments["token_ids"] = LAYOUTS[how](rng.integers(0, 23, shape).astype(code))
        arguments["segment_ids"] = LAYOUTS[how](rng.integers(0, 3, shape).astype(code))
        check(arguments)
        arguments["position_ids"] = LAYOUTS[how](rng.integers(0, 11, shape).astype(code))
        check(arguments)


def test_ids_with_axes_exchanged() -> None:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 3, (4, 3, 5))
    for axes in itertools.permutations(range(3)):
        view = ids.transpose(axes)
        check(small(token_ids=view, segment_ids=view))
        check(small(token_ids=ids.reshape(-1)[:: len(axes)], segment_ids=None, position_ids=[2]))


def test_ids_with_zero_strides() -> None:
    row, column = np.array([3, 1, 22, 8]), np.array([[2], [0], [1]])
    check(
        small(token_ids=np.broadcast_to(row, (3, 4)), segment_ids=np.broadcast_to(column, (3, 4)))
    )
    check(small(token_ids=np.broadcast_to(row[1:2], (2, 3, 4)), segment_ids=None))


class OnlyArray:
    """Has `__array__` in its present form and nothing else."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._values, dtype=dtype)


class OnlyOldArray:
    """Has `__array__` in the form of NumPy 1."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __array__(self, dtype: Any = None) -> Array:
        return np.array(self._values, dtype=dtype)


class OnlyDLPack:
    """Has the present DLPack protocol and nothing else."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class OnlyOldDLPack(OnlyDLPack):
    """Has the DLPack protocol of before its versions were numbered."""

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return self._values.__dlpack__()


class Stubborn(np.ndarray):
    """An ndarray subclass whose own operators all misbehave."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("indexed as a subclass")

    def __array_ufunc__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("computed as a subclass")


def stubborn(values: Any) -> Array:
    return np.array(values).view(Stubborn)


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda ids: np.array(ids).tolist(),
    "tuple": lambda ids: tuple(tuple(row) for row in np.array(ids).tolist()),
    "list of arrays": lambda ids: list(np.array(ids)),
    "tuple of array.array": lambda ids: tuple(array.array("i", r) for r in np.array(ids).tolist()),
    "memoryview": lambda ids: memoryview(np.array(ids)),
    "strided memoryview": lambda ids: memoryview(np.repeat(np.array(ids), 2, axis=0))[::2],
    "read-only memoryview": lambda ids: memoryview(np.array(ids)).toreadonly(),
    "ctypes array": lambda ids: np.ctypeslib.as_ctypes(np.array(ids, np.int32)),
    "__array__": OnlyArray,
    "old __array__": OnlyOldArray,
    "__dlpack__": OnlyDLPack,
    "old __dlpack__": OnlyOldDLPack,
    "subclass": stubborn,
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_ids_in_containers(container: str, name: str) -> None:
    arguments = small(position_ids=np.array([[10, 0, 9, 1], [2, 2, 5, 6]]))
    expected = check(arguments)
    assert_same_bits(
        bert_embeddings(**arguments | {name: CONTAINERS[container](arguments[name])}), expected
    )


FLAT_CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "bytearray": bytearray,
    "memoryview of bytes": lambda ids: memoryview(bytes(ids)),
    "memoryview backwards": lambda ids: memoryview(bytes(ids[::-1]))[::-1],
    "list of NumPy scalars": lambda ids: [np.int32(i) for i in ids],
    "ctypes": lambda ids: (ctypes.c_uint16 * len(ids))(*ids),
} | {f"array.array {code}": lambda ids, code=code: array.array(code, ids) for code in ID_CODES}


@pytest.mark.parametrize("container", FLAT_CONTAINERS)
def test_ids_in_flat_containers(container: str) -> None:
    ids, zeros = [3, 22, 0, 7], [0, 2, 1, 1]
    arguments = small(token_ids=ids, segment_ids=zeros)
    expected = check(arguments)
    make = FLAT_CONTAINERS[container]
    assert_same_bits(bert_embeddings(**arguments | {"token_ids": make(ids)}), expected)
    assert_same_bits(bert_embeddings(**arguments | {"segment_ids": make(zeros)}), expected)


def test_ids_in_a_range() -> None:
    check(small(token_ids=range(10, 0, -1), segment_ids=None))
    check(small(token_ids=[range(4), range(4, 8)], position_ids=range(3, 7)))


def test_ids_in_a_memory_map(tmp_path: Path) -> None:
    arguments = small()
    for name in ("token_ids", "segment_ids"):
        path = tmp_path / name
        arguments[name].astype(np.int32).tofile(path)
        arguments[name] = np.memmap(path, np.int32, "r", shape=(2, 4))
    check(arguments)


@needs_torch
@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "int32", "int64"])
def test_ids_in_torch_tensors(kind: str) -> None:
    arguments = small()
    expected = check(arguments)
    tensors = {
        name: torch.tensor(arguments[name], dtype=getattr(torch, kind))
        for name in ("token_ids", "segment_ids")
    }
    assert_same_bits(bert_embeddings(**arguments | tensors), expected)
    turned = {name: tensor.t().contiguous().t() for name, tensor in tensors.items()}
    assert not turned["token_ids"].is_contiguous()
    assert_same_bits(bert_embeddings(**arguments | turned), expected)
    row = torch.tensor([3, 1, 2], dtype=getattr(torch, kind)).expand(4, 3)
    check(small(token_ids=row.numpy(), segment_ids=None))
    assert_same_bits(
        bert_embeddings(**small(token_ids=row, segment_ids=None)),
        check(small(token_ids=row.numpy(), segment_ids=None)),
    )


# Broadcasting


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 1), (1, 1), (1,), (2, 4)])
def test_segments_and_positions_broadcast(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    segments, positions = rng.integers(0, 3, shape), rng.integers(0, 11, shape)
    for kind in (np.int64, np.int32, np.uint8, ">i2"):
        check(small(segment_ids=segments.astype(kind)))
        check(small(position_ids=positions.astype(kind)))
        check(small(segment_ids=segments.astype(kind), position_ids=positions.astype(kind)))
        check(small(segment_ids=None, position_ids=positions.astype(kind)))


def test_broadcasting_in_every_axis() -> None:
    rng = np.random.default_rng(2)
    shape = (2, 3, 2, 4)
    token_ids = rng.integers(0, 23, shape)
    for kept in itertools.product([True, False], repeat=4):
        part = tuple(n if keep else 1 for n, keep in zip(shape, kept, strict=True))
        segment_ids, position_ids = rng.integers(0, 3, part), rng.integers(0, 11, part)
        for drop in range(4):
            if part[:drop] == (1,) * drop:
                check(
                    small(
                        token_ids=token_ids,
                        segment_ids=segment_ids.reshape(part[drop:]),
                        position_ids=position_ids.reshape(part[drop:])[..., ::-1],
                    )
                )


def test_no_segments_are_zeros() -> None:
    arguments = small(segment_ids=None)
    zeros = small(segment_ids=np.zeros((2, 4), int))
    assert_same_bits(check(arguments), check(zeros))


def test_positions_count_from_zero_in_each_sequence() -> None:
    given = small(position_ids=np.broadcast_to(np.arange(4), (2, 4)))
    assert_same_bits(check(small()), check(given))


def test_given_positions_lift_the_limit_on_length() -> None:
    check(small(token_ids=np.arange(40) % 23, segment_ids=None, position_ids=np.arange(40) % 11))


def test_more_or_fewer_than_two_segments() -> None:
    rng = np.random.default_rng(4)
    for rows in (1, 2, 3, 7):
        table, ids = rng.standard_normal((rows, 5)), rng.integers(0, rows, (2, 4))
        ids[0, 0] = rows - 1
        check(small(segment_embeddings=table, segment_ids=ids))


EMPTY: list[Any] = [
    np.zeros((0, 7), np.int64),
    np.zeros((3, 0), np.int32),
    np.zeros((0, 0), np.uint8),
    np.zeros((2, 0, 4), np.int64),
    np.zeros((2, 0, 4), np.int64)[::-1, :, ::2],
    [],
    (),
    [[], []],
    range(0),
    array.array("q"),
]


@pytest.mark.parametrize("ids", EMPTY, ids=lambda ids: f"{type(ids).__name__} {np.shape(ids)}")
@pytest.mark.parametrize("name", FLOATS)
def test_empty_batches_and_sequences(name: str, ids: Any) -> None:
    dtype, shape = dtype_of(name), (*np.shape(ids), 5)
    result = bert_embeddings(**small(token_ids=ids, segment_ids=None), dtype=dtype)
    assert_same_bits(result, np.empty(shape, dtype))
    out = np.empty(shape, dtype)
    options = {"dtype": dtype, "out": out, "position_ids": ids, "num_threads": 2}
    assert bert_embeddings(**small(token_ids=ids, segment_ids=ids), **options) is out


def test_empty_lists_broadcast() -> None:
    assert bert_embeddings(**small(token_ids=[[], []], segment_ids=[])).shape == (2, 0, 5)
    assert bert_embeddings(**small(token_ids=[], segment_ids=[0])).shape == (0, 5)


# Tables


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("token", FLOATS)
def test_float_tables(token: str, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    ids = {"token_ids": [[4, 0, 6, 2, 1], [5, 3, 3, 6, 0]], "segment_ids": [0, 1, 1, 0, 1]}
    for position, segment in itertools.product(FLOAT_NAMES, repeat=2):
        tables = [
            table_of(rng, 7, width, token),
            table_of(rng, 5, width, position),
            table_of(rng, 2, width, segment),
        ]
        check(ids | dict(zip(TABLES, tables, strict=True)), dtype=dtype_of(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FLOATS)
def test_every_width(name: str, dtype: str) -> None:
    """No width is special, however many elements a vector register holds."""
    rng = np.random.default_rng(11)
    tables = dict(zip(TABLES, (table_of(rng, n, 140, name) for n in (4, 3, 2)), strict=True))
    ids = {"token_ids": [3, 1, 2], "segment_ids": [1, 0, 1]}
    for width in range(1, 141):
        check(ids | {k: t[:, 140 - width :] for k, t in tables.items()}, dtype=dtype_of(dtype))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("how", LAYOUTS)
def test_tables_of_every_layout(how: str, kind: str, name: str) -> None:
    rng = np.random.default_rng(13)
    for width in (1, 2, 7, 33):
        tables = [table_of(rng, rows, width, kind) for rows in (23, 11, 3)]
        arguments = small(**dict(zip(TABLES, tables, strict=True)))
        arguments[name] = LAYOUTS[how](arguments[name])
        check(arguments, dtype=np.float32)
        check(arguments, dtype=np.float64)


@pytest.mark.parametrize("kind", FLOATS)
def test_tables_with_one_row_or_column_and_odd_strides(kind: str) -> None:
    rng = np.random.default_rng(17)
    column = table_of(rng, 23, 9, kind)[:, 2::7][:, :1]
    odd = np.lib.stride_tricks.as_strided(column, strides=(column.strides[0], 12345))
    one_row = table_of(rng, 4, 1, kind)[3:]
    arguments = {
        "token_ids": [[3, 22, 1], [0, 5, 9]],
        "segment_ids": None,
        "token_embeddings": odd,
        "position_embeddings": np.broadcast_to(one_row, (50, 1)),
        "segment_embeddings": np.lib.stride_tricks.as_strided(one_row, strides=(-777, 0)),
    }
    check(arguments, dtype=np.float32)


@pytest.mark.parametrize("code", ID_CODES)
def test_integer_tables_are_float64(code: str) -> None:
    rng = np.random.default_rng(19)
    dtype = np.dtype(code).name
    tables = [table_of(rng, rows, 6, dtype) for rows in (23, 11, 3)]
    tables[0][3] = np.iinfo(code).max
    arguments = small(**dict(zip(TABLES, tables, strict=True)))
    for result in FLOAT_NAMES:
        check(arguments, dtype=dtype_of(result))
    check(arguments | {"token_embeddings": swapped(tables[0])[:, ::-1]})


def test_integer_tables_round_once() -> None:
    """2**53 + 1 is no float64, and float64 is where the sum happens even for a float32 result."""
    arguments = {
        "token_ids": [0, 1],
        "segment_ids": [0, 1],
        "token_embeddings": [[2**53 + 1], [2**24]],
        "position_embeddings": [[1], [1]],
        "segment_embeddings": np.array([[0], [2]], np.int16),
    }
    assert bert_embeddings(**arguments).tolist() == [[2.0**53], [2**24 + 3]]
    assert bert_embeddings(**arguments, dtype="float32").tolist() == [[2.0**53], [2**24 + 4]]


@pytest.mark.parametrize("name", TABLES)
def test_nested_list_tables_are_float64(name: str) -> None:
    arguments = small()
    tables = {n: arguments[n].astype(np.float32) for n in TABLES if n != name}
    for values in (arguments[name].tolist(), tuple(map(tuple, arguments[name].tolist()))):
        check(arguments | tables | {name: values}, dtype=np.float32)
        check(arguments | tables | {name: values})


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    "container",
    ["memoryview", "__array__", "old __array__", "__dlpack__", "old __dlpack__", "subclass"],
)
def test_tables_in_containers(container: str, kind: str, name: str) -> None:
    arguments = small()
    arguments[name] = arguments[name].astype(kind)
    expected = check(arguments)
    result = bert_embeddings(**arguments | {name: CONTAINERS[container](arguments[name])})
    assert_same_bits(result, expected)


def test_tables_in_a_memory_map(tmp_path: Path) -> None:
    arguments = small()
    for name in TABLES:
        path = tmp_path / name
        path.write_bytes(b"head " + arguments[name].astype(np.float32).tobytes())
        shape = arguments[name].shape
        arguments[name] = np.memmap(path, np.float32, "r", offset=5, shape=shape)
        assert not arguments[name].flags.writeable
    check(arguments)
    check(arguments, dtype=np.float32)


@needs_torch
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_tables_in_torch_tensors(kind: str, gradient: bool, name: str) -> None:
    arguments = small()
    exact = torch.tensor(arguments[name]).to(getattr(torch, kind))
    arguments[name] = exact.to(torch.float32 if kind != "float64" else torch.float64).numpy()
    for dtype in FLOAT_NAMES:
        expected = check(arguments, dtype=dtype_of(dtype))
        for tensor in (exact, exact.t().contiguous().t(), torch.cat([exact, exact], 1)[:, :5]):
            table = tensor.detach().requires_grad_(gradient)
            result = bert_embeddings(**arguments | {name: table}, dtype=dtype_of(dtype))
            assert_same_bits(result, expected)


@needs_torch
def test_torch_parameters_as_every_table() -> None:
    arguments = small()
    modules = {
        name: torch.nn.Embedding.from_pretrained(torch.tensor(arguments[name]), freeze=False)
        for name in TABLES
    }
    result = bert_embeddings(**arguments | {name: m.weight for name, m in modules.items()})
    assert_same_bits(result, check(arguments))


QUANTIZED = ["quantized int8", "quantized uint8"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_tables(kind: str, width: int) -> None:
    ids = {"token_ids": [[4, 0, 6, 2, 1], [5, 3, 3, 6, 0]], "segment_ids": [0, 1, 1, 0, 1]}
    others = ["float32", "float64", kind, FLOAT_NAMES[-1]]
    for seed, (dtype, other) in enumerate(itertools.product(FLOAT_NAMES, others)):
        rng = np.random.default_rng(seed)
        for roles in ((kind, other, other), (other, kind, other), (other, other, kind)):
            tables = [table_of(rng, n, width, r) for n, r in zip((7, 5, 2), roles, strict=True)]
            check(ids | dict(zip(TABLES, tables, strict=True)), dtype=dtype_of(dtype))


@pytest.mark.parametrize("zero_point", [None, "table", "row"])
@pytest.mark.parametrize("scale", ["table", "row"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_quantized_tables_every_step(dtype: Any, scale: str, zero_point: str | None) -> None:
    """All 256 values, with zero points and scales at their limits, in each table's place."""
    limits = np.iinfo(dtype)
    values = np.tile(np.arange(limits.min, limits.max + 1).astype(dtype), (9, 1))
    scales = np.array([1, 0.1, -0.3, 0, 1e-45, 3e38, np.inf, np.nan, -0.0], np.float32)
    zeros = np.linspace(limits.min, limits.max, 9).astype(dtype)
    nothing = np.full((9, 256), -0.0, np.float32)
    for row in range(9):
        table = Quantized(
            values,
            scales if scale == "row" else scales[row],
            None if zero_point is None else zeros if zero_point == "row" else int(zeros[row]),
        )
        for place in range(3):
            tables = [nothing, nothing, nothing]
            tables[place] = table  # type: ignore[call-overload]
            arguments = dict(zip(TABLES, tables, strict=True))
            ids = np.arange(9) if scale == "row" else np.array([row])
            arguments |= {"token_ids": ids, "segment_ids": ids, "position_ids": ids}
            check(arguments, dtype=np.float32)
            check(arguments, dtype=np.float64)
        if scale == "row" and zero_point != "table":
            break


@pytest.mark.parametrize("how", LAYOUTS)
def test_quantized_tables_of_every_layout(how: str) -> None:
    rng = np.random.default_rng(23)
    for kind in (np.int8, np.uint8):
        for width in (1, 6, 40):
            values = rng.integers(0, 100, (23, width)).astype(kind)
            scale = np.repeat(rng.random(23).astype(np.float32), 2)[::2]
            zero_point = read_only(np.arange(23).astype(kind))
            arguments = small(
                token_embeddings=Quantized(LAYOUTS[how](values), scale, zero_point),
                position_embeddings=rng.standard_normal((11, width)).astype(np.float32),
                segment_embeddings=rng.standard_normal((3, width)).astype(np.float32),
            )
            check(arguments, dtype=np.float32)


def test_quantized_scale_may_be_a_python_number() -> None:
    values = np.arange(-10, 10, dtype=np.int8).reshape(4, 5)
    arguments = small(segment_embeddings=Quantized(values, np.float32(0.5), 3))
    expected = check(arguments)
    table = QuantizedTable(values, 0.5, np.int8(3))
    assert_same_bits(bert_embeddings(**arguments | {"segment_embeddings": table}), expected)
    ids = {"token_ids": [[0, 3, 1, 2]], "segment_ids": None}
    plain = QuantizedTable(values=values, scale=0.5, zero_point=3)
    check(small(token_embeddings=Quantized(values, np.float32(0.5), 3), **ids))
    bert_embeddings(**small(token_embeddings=plain, **ids))


VALUES = np.zeros((4, 5), np.int8)
SCALES = np.ones(4, np.float32)
BAD_QUANTIZED: list[tuple[type[Exception] | tuple[type[Exception], ...], tuple[Any, ...]]] = [
    (TypeError, (VALUES.astype(np.int16), SCALES)),
    (TypeError, (VALUES.astype(np.float32), SCALES)),
    (TypeError, (VALUES.astype(bool), SCALES)),
    (ValueError, (VALUES[0], 1.0)),
    (ValueError, (VALUES[None], 1.0)),
    (ValueError, (VALUES, SCALES[:3])),
    (ValueError, (VALUES, np.ones(5, np.float32))),
    (ValueError, (VALUES, np.ones((4, 5), np.float32))),
    (TypeError, (VALUES, np.ones(4, np.int32))),
    (TypeError, (VALUES, np.ones(4, np.complex64))),
    (TypeError, (VALUES, np.array(["1"] * 4))),
    (TypeError, (VALUES, SCALES, np.zeros(4, np.uint8))),
    (TypeError, (VALUES, SCALES, np.zeros(4, np.float32))),
    (TypeError, (VALUES, SCALES, 1.5)),
    ((ValueError, OverflowError), (VALUES, SCALES, 128)),
    ((ValueError, OverflowError), (VALUES.astype(np.uint8), SCALES, -1)),
    (ValueError, (VALUES, SCALES, np.zeros(3, np.int8))),
]


@pytest.mark.parametrize("number", range(len(BAD_QUANTIZED)))
def test_quantized_tables_that_are_none(number: int) -> None:
    kind, arguments = BAD_QUANTIZED[number]
    with pytest.raises(kind):
        QuantizedTable(*arguments)


# Arithmetic


def combinations(token: Array, position: Array, segment: Array) -> Arguments:
    """Every sum of an element of each, side by side in one row."""
    grids = np.meshgrid(*(np.arange(x.size) for x in (token, position, segment)), indexing="ij")
    rows = [x[g.reshape(1, -1)] for x, g in zip((token, position, segment), grids, strict=True)]
    return {"token_ids": [0], "segment_ids": [0], **dict(zip(TABLES, rows, strict=True))}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("segment", FLOATS)
@pytest.mark.parametrize("position", FLOATS)
@pytest.mark.parametrize("token", FLOATS)
def test_special_values(token: str, position: str, segment: str, dtype: str) -> None:
    fewer = specials(segment)[[0, 1, 3, 4, 6, 7, 9, 11, 12, 14, 15, 18, 23, 25]]
    arguments = combinations(specials(token), specials(position), fewer)
    result = check(arguments, dtype=dtype_of(dtype))
    values = decoded(result)
    assert all(kind(values).any() for kind in (np.isnan, np.isinf, np.isfinite))
    assert (np.signbit(values) & (values == 0)).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", ["float16", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_every_half_precision_value(name: str, place: int, dtype: str) -> None:
    every = np.arange(2**16).astype(np.uint16).view(dtype_of(name)).reshape(64, 1024)
    nothing = np.full((64, 1024), -0.0, np.float16)  # the one number that changes no other
    tables = [nothing, nothing, nothing]
    tables[place] = every
    ids = np.arange(64)
    arguments = {"token_ids": ids, "segment_ids": ids, **dict(zip(TABLES, tables, strict=True))}
    check(arguments, dtype=dtype_of(dtype))


def around_halves(dtype: str, wide: str) -> Array:
    """Numbers of type `wide` at, right above and right below halves of the unit of `dtype`."""
    digits, least, most = FORMATS[dtype]
    exponents = [least - digits, least - digits + 1, least - 3, least - 1, least, -1, 0, 5, most]
    numbers = []
    for exponent in exponents:
        unit = 2.0 ** (max(exponent, least) - digits + 1)
        for steps in (0, 1, 2, 3, 2 ** (digits - 1) - 2, 2 ** (digits - 1) - 1):
            for half in (0.25, 0.5, 0.75, 1.0, 1.5):
                number = round_once(2.0**exponent + (steps + half) * unit, wide)
                zero, far = number.dtype.type(0), number.dtype.type(np.inf)
                numbers += [number, np.nextafter(number, zero), np.nextafter(number, far)]
    positive = np.array(numbers, dtype_of(wide))
    assert np.unique(positive).size > 100
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("wide", "dtype"),
    [
        ("float64", "float32"),
        ("float64", "float16"),
        ("float32", "float16"),
        pytest.param("float64", "bfloat16", marks=needs_bfloat16),
        pytest.param("float32", "bfloat16", marks=needs_bfloat16),
    ],
)
def test_halves_round_to_even_once(wide: str, dtype: str, place: int) -> None:
    values = around_halves(dtype, wide)
    tables = [np.full((1, values.size), -0.0, np.float16) for _ in range(3)]
    tables[place] = values[None]
    arguments = {"token_ids": [0], "segment_ids": [0], **dict(zip(TABLES, tables, strict=True))}
    check(arguments, dtype=dtype_of(dtype))


@needs_bfloat16
def test_float64_to_bfloat16_takes_no_detour() -> None:
    """Just above a half: rounded to float32 first, it would become the half and go down."""
    just_above = 1 + 2.0**-8 + 2.0**-40
    arguments = small(token_ids=[0], segment_ids=[0])
    zero = np.zeros((1, 1))
    arguments |= dict(zip(TABLES, (zero + just_above, zero, zero), strict=True))
    assert float(bert_embeddings(**arguments, dtype="bfloat16")[0, 0]) == 1 + 2.0**-7


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_token_and_position_are_added_first(name: str) -> None:
    big = {"float64": 1e16, "float32": 1e8}[name]
    rows = [
        np.array([[x, y, z]], name) for x, y, z in ((big, 1, big), (-big, big, 1), (1, -big, -big))
    ]
    arguments = {"token_ids": [0], "segment_ids": [0], **dict(zip(TABLES, rows, strict=True))}
    assert bert_embeddings(**arguments, dtype=name).tolist() == [[1.0, 0.0, 0.0]]


def test_the_sum_is_rounded_once() -> None:
    """2048 + 1 + 1 in float16 steps would stay 2048; in float32 it is 2050."""
    rows = [np.array([[x]], np.float16) for x in (2048, 1, 1)]
    arguments = {"token_ids": [0], "segment_ids": [0], **dict(zip(TABLES, rows, strict=True))}
    assert bert_embeddings(**arguments, dtype=np.float16).tolist() == [[2050.0]]


def test_the_widest_type_computes() -> None:
    """float32 where nothing is wider; float64 as soon as the result or one table is."""
    ids = {"token_ids": [0], "segment_ids": [0]}
    rows = [np.array([[x]], np.float32) for x in (2.0**24, 1, 1)]
    arguments = ids | dict(zip(TABLES, rows, strict=True))
    assert bert_embeddings(**arguments, dtype=np.float32).tolist() == [[2.0**24]]
    assert bert_embeddings(**arguments).tolist() == [[2.0**24 + 2]]
    for name in TABLES:
        wider = arguments | {name: arguments[name].astype(np.float64)}
        assert bert_embeddings(**wider, dtype=np.float32).tolist() == [[2.0**24 + 2]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_place_in_the_batch_changes_nothing(dtype: str) -> None:
    rng = np.random.default_rng(29)
    arguments: Arguments = {
        "token_ids": rng.integers(0, 97, (5, 64)),
        "segment_ids": rng.integers(0, 2, (5, 64)),
        "token_embeddings": table_of(rng, 97, 131, "float32", wild=0.1),
        "position_embeddings": table_of(rng, 64, 131, "float32", wild=0.1),
        "segment_embeddings": table_of(rng, 2, 131, "float32", wild=0.1),
    }
    batch = check(arguments, dtype=dtype_of(dtype))
    for b in range(5):
        alone = {name: arguments[name][b] for name in ("token_ids", "segment_ids")}
        expected = bert_embeddings(**arguments | alone, dtype=dtype_of(dtype))
        assert_same_bits(batch[b], expected)
        one = {name: arguments[name][b, 9:10] for name in ("token_ids", "segment_ids")}
        one["position_ids"] = [9]
        assert_same_bits(bert_embeddings(**arguments | one, dtype=dtype_of(dtype)), expected[9:10])


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED])
@pytest.mark.parametrize("shape", [(1, 1), (1, 127), (3, 1500), (4099, 2), (37, 11, 13)])
def test_threads_change_nothing(shape: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(31)
    arguments: Arguments = {
        "token_ids": rng.integers(0, 501, shape),
        "segment_ids": rng.integers(0, 2, shape[-1:]),
        "token_embeddings": table_of(rng, 501, 200, kind, wild=0.05),
        "position_embeddings": table_of(rng, 1500, 200, kind, wild=0.05),
        "segment_embeddings": table_of(rng, 2, 200, kind, wild=0.05),
    }
    for dtype in (np.float32, np.float64):
        expected = check(arguments, dtype=dtype)
        ours = {k: given_to_package(v) for k, v in arguments.items()}
        for threads in (1, 2, 3, 7):
            out = np.full_like(expected, 42)
            options = {"dtype": dtype, "num_threads": threads, "out": out}
            assert bert_embeddings(**ours, **options) is out
            assert_same_bits(out, expected)


INSTRUCTION_SETS = """
    import hashlib
    import numpy as np
    from bertinput import QuantizedTable, bert_embeddings

    rng = np.random.default_rng(0)
    digest = hashlib.sha256()

    def table(kind, rows, width):
        if kind == "quantized":
            values = rng.integers(-128, 128, (rows, width)).astype(np.int8)
            return QuantizedTable(values, rng.random(rows, np.float32), np.int8(3))
        unsigned = {{2: np.uint16, 4: np.uint32, 8: np.uint64}}[np.dtype(kind).itemsize]
        wild = rng.integers(0, np.iinfo(unsigned).max, (rows, width), unsigned).view(kind)
        return np.where(rng.random((rows, width)) < 0.3, wild, rng.standard_normal((rows, width)))

    kinds, results = ["f8", "f4", "f2", "quantized"], {results}
    for width in (1, 5, 16, 67, 300):
        for first in kinds:
            for other in kinds:
                tables = [table(first, 9, width), table(other, 7, width), table(other, 2, width)]
                for dtype in results:
                    ids = rng.integers(0, 9, (3, 7))
                    sum = bert_embeddings(ids, ids % 2, *tables, dtype=dtype)
                    sum[np.isnan(sum)] = 0
                    digest.update(sum.tobytes())
    print(digest.hexdigest())
"""


def test_every_instruction_set_computes_the_same(fresh_python: Python) -> None:
    """The tests above hold the one that this machine prefers to the reference."""
    built = fresh_python("import bertinput; print(*bertinput.build_info()['instruction_sets'])")
    code = INSTRUCTION_SETS.format(results=FLOAT_NAMES)
    preferred = fresh_python(code)
    assert len(preferred.split()) == 1
    tried = []
    for name in built.split():
        try:
            digest = fresh_python(code, BERTINPUT_ISA=name)
        except AssertionError as error:
            if f"BERTINPUT_ISA={name!r}" not in str(error):  # more than this processor has
                raise
            continue
        assert digest == preferred
        tried.append(name)
    assert tried


@needs_linux
def test_tables_of_several_gigabytes(tmp_path: Path) -> None:
    """Row offsets do not fit 32 bits, nor do the elements' numbers."""
    table = np.memmap(tmp_path / "sparse", np.float32, "w+", shape=(2**21 + 3, 1024))
    rows = [0, 1, 2**19 + 1, 2**20, 2**21 - 1, 2**21, 2**21 + 2]
    for row in rows:
        table[row] = row + np.arange(1024) / 1024
    position, segment = np.zeros((7, 1024), np.float32), np.ones((1, 1024), np.float32)
    result = bert_embeddings(rows, None, table, position, segment, dtype="float32")
    assert_same_bits(result, table[rows].view(np.ndarray) + segment)
    result = bert_embeddings([0] * 7, None, position, table, segment, position_ids=rows)
    assert_same_bits(result, table[rows].view(np.ndarray).astype(float) + 1.0)


# The whole of it at random

ANY_TABLE = [*FLOAT_NAMES, *FLOAT_NAMES, "int16", *QUANTIZED]


@st.composite
def random_calls(draw: st.DrawFn) -> tuple[Arguments, Arguments]:
    """Valid arguments of any kind, and options."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (*draw(st.lists(st.integers(0, 3), max_size=5)), draw(st.integers(0, 9)))
    width = draw(st.one_of(st.sampled_from([1, 2, 3, 4, 8, 16, 31, 64]), st.integers(1, 70)))
    rows = [draw(st.integers(1, 40)), shape[-1] + draw(st.integers(0, 3)), draw(st.integers(1, 4))]
    rows[1] = max(rows[1], 1)
    wild = draw(st.sampled_from([0.0, 0.3, 1.0]))

    def ids(limit: int, broadcast: bool) -> Any:
        part = shape
        if broadcast:
            part = tuple(n if draw(st.booleans()) else 1 for n in shape)
            while len(part) > 1 and part[0] == 1 and draw(st.booleans()):
                part = part[1:]
        values = rng.integers(0, limit, part).astype(draw(st.sampled_from(ID_CODES)))
        how = draw(st.sampled_from([*LAYOUTS, "list"]))
        # A list of zero rows has lost how long the rows were.
        if how == "list":
            return values.tolist() if np.shape(values.tolist()) == part else values
        return LAYOUTS[how](values)

    arguments: Arguments = {"token_ids": ids(rows[0], False), "segment_ids": None}
    if draw(st.booleans()):
        arguments["segment_ids"] = ids(rows[2], True)
    for name, n in zip(TABLES, rows, strict=True):
        table = table_of(rng, n, width, draw(st.sampled_from(ANY_TABLE)), wild)
        if not isinstance(table, Quantized):
            table = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](table)
        arguments[name] = table
    if draw(st.booleans()):
        arguments["position_ids"] = ids(rows[1], True)
    dtype = dtype_of(draw(st.sampled_from(FLOAT_NAMES)))
    options: Arguments = {"dtype": dtype, "num_threads": draw(st.sampled_from([None, 1, 2, 3, 7]))}
    if draw(st.booleans()):
        out = LAYOUTS[draw(st.sampled_from(["contiguous", "misaligned"]))]
        options["out"] = out(np.full((*shape, width), 3, dtype))
    return arguments, options


@settings(max_examples=500)
@given(random_calls())
def test_any_call(call: tuple[Arguments, Arguments]) -> None:
    arguments, options = call
    result = check(arguments, **options)
    if "out" in options:
        assert result is options["out"]


@settings(max_examples=150)
@given(st.data())
def test_any_bad_id_is_found_first(data: st.DataObject) -> None:
    """However many ids are wrong, the first in C order is reported, in the right argument."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    arguments = small(token_ids=rng.integers(0, 23, shape), segment_ids=None)
    parts = {name: tuple(n if draw(st.booleans()) else 1 for n in shape) for name in IDS}
    parts["token_ids"] = shape
    limits = {"token_ids": 23, "segment_ids": 3, "position_ids": 11}
    code = draw(st.sampled_from("bhilqBHILQ"))
    wrong = draw(st.lists(st.sampled_from(IDS), min_size=1, unique=True))
    for name in IDS:
        ids = rng.integers(0, limits[name], parts[name]).astype(code)
        if name in wrong:
            top = np.iinfo(code).max
            bad = draw(st.one_of(st.integers(limits[name], top), st.integers(101, top)))
            if np.dtype(code).kind == "i" and draw(st.booleans()):
                bad = -draw(st.integers(1, top + 1))
            for place in draw(st.lists(st.integers(0, ids.size - 1), min_size=1, max_size=3)):
                ids.reshape(-1)[place] = bad
        arguments[name] = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](ids)
    first = next(name for name in ("token_ids", "position_ids", "segment_ids") if name in wrong)
    values, limit = arguments[first], limits[first]
    index, value = next((i, int(v)) for i, v in np.ndenumerate(values) if not 0 <= int(v) < limit)
    with pytest.raises(IndexError) as error:
        bert_embeddings(**arguments, num_threads=draw(st.sampled_from([None, 1, 2, 7])))
    says(error, f"{first}[{', '.join(map(str, index))}]", value, limit)


# The result's type

DTYPE_FORMS: list[tuple[Any, str]] = [
    (np.float64, "float64"),
    (np.float32, "float32"),
    (np.float16, "float16"),
    (np.dtype("float64"), "float64"),
    (np.dtype("float32"), "float32"),
    (np.dtype("float16"), "float16"),
    ("float64", "float64"),
    ("float32", "float32"),
    ("float16", "float16"),
    ("f8", "float64"),
    ("f4", "float32"),
    ("e", "float16"),
    (float, "float64"),
    (np.half, "float16"),
]


@pytest.mark.parametrize(("form", "name"), DTYPE_FORMS, ids=str)
def test_dtype_forms(form: Any, name: str) -> None:
    assert check(small(), dtype=form).dtype == np.dtype(name)


@needs_bfloat16
def test_dtype_bfloat16_forms() -> None:
    assert BFLOAT16 is not None
    arguments = small()
    expected = check(arguments, dtype=BFLOAT16)
    for form in ("bfloat16", BFLOAT16.type):
        result = bert_embeddings(**arguments, dtype=form)
        assert result.dtype == BFLOAT16
        assert_same_bits(result, expected)


def test_dtype_is_float64_unless_said() -> None:
    arguments = small()
    arguments |= {name: arguments[name].astype(np.float16) for name in TABLES}
    assert check(arguments).dtype == np.float64
    assert_same_bits(bert_embeddings(**arguments), bert_embeddings(**arguments, dtype=float))


BAD_DTYPES: list[Any] = [
    int,
    "int32",
    np.uint8,
    bool,
    complex,
    np.complex64,
    object,
    "S4",
    "U",
    "M8[s]",
    "float31",
    "no type",
    [("a", "f4")],
    ("f4", (2,)),
    3.5,
    np.zeros(2),
]


@pytest.mark.parametrize("dtype", BAD_DTYPES, ids=str)
def test_dtype_of_another_kind(dtype: Any) -> None:
    with pytest.raises(TypeError):
        bert_embeddings(**small(), dtype=dtype)


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_dtype_of_another_byte_order(name: str) -> None:
    with pytest.raises(TypeError):
        bert_embeddings(**small(), dtype=np.dtype(name).newbyteorder("S"))


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="longdouble is float64 here")
def test_longdouble_is_refused() -> None:
    with pytest.raises(TypeError):
        bert_embeddings(**small(), dtype=np.longdouble)
    for name in TABLES:
        with pytest.raises(TypeError) as error:
            bert_embeddings(**small(**{name: np.ones((40, 5), np.longdouble)}))
        says(error, name)


# The caller's own array


@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4)])
@pytest.mark.parametrize("name", FLOATS)
def test_out_is_filled_and_returned(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(37)
    arguments = small(token_ids=rng.integers(0, 23, shape), segment_ids=None)
    dtype = dtype_of(name)
    out = np.full((*shape, 5), 9, dtype)
    assert check(arguments, dtype=dtype, out=out) is out
    again = rng.integers(0, 23, shape)
    assert check(arguments | {"token_ids": again}, dtype=dtype, out=out) is out


@pytest.mark.parametrize("name", FLOATS)
def test_out_within_a_larger_array(name: str) -> None:
    """Nothing beside it is touched, wherever it starts."""
    dtype = dtype_of(name)
    expected = check(small(), dtype=dtype)
    for offset in range(70):
        memory = bytearray(b"\xa5" * (expected.nbytes + 200))
        out = np.ndarray(expected.shape, dtype, memory, offset=offset)
        assert bert_embeddings(**small(), dtype=dtype, out=out) is out
        assert_same_bits(np.array(out), expected)
        assert memory[:offset] == b"\xa5" * offset
        assert memory[offset + expected.nbytes :] == b"\xa5" * (200 - offset)


def test_out_in_a_memory_map(tmp_path: Path) -> None:
    expected = check(small())
    out = np.memmap(tmp_path / "out", np.float64, "w+", shape=expected.shape)
    assert bert_embeddings(**small(), out=out) is out
    out.flush()
    assert_same_bits(np.fromfile(tmp_path / "out").reshape(expected.shape), expected)


def pattern(shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    """An array whose bytes are all 0xa5."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0xA5)
    return array


def frozen_pattern() -> Array:
    out = pattern((2, 4, 5))
    out.flags.writeable = False
    return out


BAD_OUTS: dict[str, Callable[[], Any]] = {
    "read-only": frozen_pattern,
    "read-only view": lambda: np.broadcast_to(pattern((2, 4, 5)), (2, 4, 5)),
    "narrower": lambda: pattern((2, 4, 5), np.float32),
    "integers": lambda: pattern((2, 4, 5), np.int64),
    "complex": lambda: pattern((2, 4, 5), np.complex128),
    "swapped": lambda: pattern((2, 4, 5)).view(np.dtype(float).newbyteorder("S")),
    "too few": lambda: pattern((2, 3, 5)),
    "too many": lambda: pattern((2, 4, 6)),
    "one more axis": lambda: pattern((1, 2, 4, 5)),
    "one axis fewer": lambda: pattern((8, 5)),
    "flat": lambda: pattern((40,)),
    "exchanged axes": lambda: pattern((4, 2, 5)),
    "Fortran order": lambda: np.ndarray((2, 4, 5), float, pattern((40,)), order="F"),
    "transposed": lambda: pattern((5, 4, 2)).T,
    "sliced": lambda: pattern((2, 4, 10))[..., ::2],
    "rows apart": lambda: pattern((2, 4, 6))[..., :5],
    "backwards": lambda: pattern((2, 4, 5))[::-1],
    "zero strides": lambda: np.lib.stride_tricks.as_strided(pattern((5,)), (2, 4, 5), (0, 0, 8)),
}


@pytest.mark.parametrize("name", BAD_OUTS)
def test_out_that_does_not_fit(name: str) -> None:
    out = BAD_OUTS[name]()
    with pytest.raises((TypeError, ValueError)) as error:
        bert_embeddings(**small(), out=out)
    says(error, "out")
    base = out if out.base is None else out.base
    assert set(np.array(base).tobytes()) == {0xA5}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_out_of_another_float_type(other: str, dtype: str) -> None:
    if other == dtype:
        check(small(), dtype=dtype_of(dtype), out=pattern((2, 4, 5), dtype_of(other)))
        return
    out = pattern((2, 4, 5), dtype_of(other))
    with pytest.raises((TypeError, ValueError)) as error:
        bert_embeddings(**small(), dtype=dtype_of(dtype), out=out)
    says(error, "out")
    assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize(
    "out", [[[0.0] * 5] * 4, bytearray(320), memoryview(bytearray(320)), 0, "out", np.float64(1)]
)
def test_out_that_is_no_array(out: Any) -> None:
    with pytest.raises(TypeError) as error:
        bert_embeddings(**small(), out=out)
    says(error, "out")


@needs_torch
def test_out_that_is_a_tensor() -> None:
    out = torch.full((2, 4, 5), 7.0, dtype=torch.float64)
    with pytest.raises(TypeError):
        bert_embeddings(**small(), out=out)
    assert (out == 7).all()


def zeros_in(memory: Array, shape: tuple[int, ...], dtype: Any, offset: int) -> Array:
    return np.ndarray(shape, dtype, memory, offset=offset)


# Argument, its dtype and shape where it shares memory with out, which has 2 x 4 x 5 float64.
SHARERS: list[tuple[str, str, tuple[int, ...]]] = [
    ("token_ids", "i8", (2, 4)),
    ("token_ids", "i4", (2, 4)),
    ("token_ids", ">u2", (2, 4)),
    ("segment_ids", "i8", (2, 4)),
    ("segment_ids", "u1", (4,)),
    ("position_ids", "i8", (2, 4)),
    ("position_ids", "i4", (2, 1)),
    ("token_embeddings", "f8", (23, 5)),
    ("token_embeddings", "f4", (23, 5)),
    ("token_embeddings", ">f4", (23, 5)),
    ("token_embeddings", "i8", (23, 5)),
    ("position_embeddings", "f8", (11, 5)),
    ("position_embeddings", "f2", (11, 5)),
    ("segment_embeddings", "f8", (3, 5)),
    ("segment_embeddings", "i2", (3, 5)),
]


@pytest.mark.parametrize(("name", "dtype", "shape"), SHARERS)
def test_out_that_shares_memory(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    size = int(np.dtype(dtype).itemsize * np.prod(shape))
    start, length = 1024, 320
    memory = np.zeros(4096, np.uint8)
    out = zeros_in(memory, (2, 4, 5), np.float64, start)
    expected = check(small(**{name: np.zeros(shape, dtype)}))

    def share(offset: int) -> Array:
        return zeros_in(memory, shape, dtype, offset)

    inside = start + max(0, (length - size) // 2)
    # By one byte at either end, in the middle, at the same place, and surrounded.
    for offset in (start - size + 1, start + length - 1, inside, start, start + 8):
        for view in (share(offset), share(offset)[::-1], share(offset)[..., ::-1]):
            with pytest.raises((TypeError, ValueError)) as error:
                bert_embeddings(**small(**{name: view}), out=out)
            says(error, "out", name)
            assert not memory.any()
    # Right beside it is not in it.
    for offset in (start - size, start + length):
        assert bert_embeddings(**small(**{name: share(offset)}), out=out) is out
        assert_same_bits(out, expected)
        out.fill(0)
        assert not memory.any()


def test_out_between_the_rows_of_an_input() -> None:
    """No element is shared, but memory bounds decide."""
    memory = np.zeros((23, 48))
    table, out = memory[:, :5], memory[3, 6:46].reshape(2, 4, 5)
    assert not np.shares_memory(table, out)
    with pytest.raises((TypeError, ValueError)) as error:
        bert_embeddings(**small(token_embeddings=table), out=out)
    says(error, "out", "token_embeddings")
    assert not memory.any()
    apart = memory[-1, 6:46].reshape(2, 4, 5)  # beyond the table's last element
    assert bert_embeddings(**small(token_embeddings=table), out=apart) is apart


def test_out_that_shares_memory_with_a_zero_stride() -> None:
    out = np.zeros((2, 4, 5))
    ids = np.broadcast_to(out.view(np.int64)[1, 2, 3:4], (2, 4))
    rows = np.broadcast_to(out[1, 3], (23, 5))
    for arguments in (small(token_ids=ids), small(token_embeddings=rows)):
        with pytest.raises((TypeError, ValueError)):
            bert_embeddings(**arguments, out=out)
        assert not out.any()


def test_out_that_shares_memory_through_other_objects() -> None:
    memory = bytearray(320)
    out = np.frombuffer(memory).reshape(2, 4, 5)
    floats = np.frombuffer(memory, np.float64)[:15].reshape(3, 5)
    sharing: list[Arguments] = [
        {"token_ids": np.frombuffer(memory, np.uint8)[:8].reshape(2, 4)},
        {"segment_ids": memoryview(memory)[100:104]},
        {"position_ids": memoryview(memory)[319:]},
        {"segment_embeddings": memoryview(floats)},
        {"segment_embeddings": stubborn_view(floats)},
        {"segment_embeddings": QuantizedTable(zeros_in(out.view("i1"), (3, 5), "i1", 9), 1.0)},
    ]
    if torch is not None:
        tensor = torch.frombuffer(memory, dtype=torch.float64)[:15].reshape(3, 5)
        half = torch.frombuffer(memory, dtype=torch.bfloat16)[:15].reshape(3, 5)
        sharing += [
            {"segment_embeddings": tensor},
            {"segment_embeddings": torch.nn.Parameter(tensor)},
            {"segment_embeddings": half},
            {"token_ids": torch.frombuffer(memory, dtype=torch.int32)[:8].reshape(2, 4)},
        ]
    for changes in sharing:
        with pytest.raises((TypeError, ValueError)) as error:
            bert_embeddings(**small(**changes), out=out)
        says(error, "out", *changes)
        assert not out.any()


def stubborn_view(values: Array) -> Array:
    return values.view(Stubborn)


# Threads


@pytest.mark.parametrize("count", [1, 2, 64, 10**6, 2**31, 2**64, np.int64(2), np.uint8(3), None])
def test_num_threads(count: Any) -> None:
    check(small(), num_threads=count)
    check(
        small(token_ids=np.arange(80_000).reshape(-1, 8) % 23, segment_ids=None), num_threads=count
    )


@pytest.mark.parametrize("count", [0, -1, -(2**31), -(2**70), np.int8(-3)])
def test_num_threads_below_one(count: Any) -> None:
    out = pattern((2, 4, 5))
    with pytest.raises(ValueError, match="num_threads") as error:
        bert_embeddings(**small(), num_threads=count, out=out)
    says(error, count)
    assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("count", [1.0, 2.5, np.float64(1), "2", [1], True, False, np.True_])
def test_num_threads_that_is_no_integer(count: Any) -> None:
    out = pattern((2, 4, 5))
    with pytest.raises(TypeError) as error:
        bert_embeddings(**small(), num_threads=count, out=out)
    says(error, "num_threads")
    assert set(out.tobytes()) == {0xA5}


# Errors

BAD_ID_TYPES: dict[str, Any] = {
    "float": np.zeros((2, 4)),
    "float16": np.zeros((2, 4), np.float16),
    "bool": np.zeros((2, 4), bool),
    "object": np.zeros((2, 4), object),
    "string": np.full((2, 4), "1"),
    "bytes": np.full((2, 4), b"1"),
    "complex": np.zeros((2, 4), complex),
    "time": np.zeros((2, 4), "m8[s]"),
    "date": np.zeros((2, 4), "M8[s]"),
    "record": np.zeros((2, 4), [("id", "i8")]),
    "list of floats": [[0.0, 1.0, 2.0, 0.0]],
    "list with a float": [0, 1, 2.0, 0],
    "list of bools": [[True, False, True, False]],
    "list of strings": ["0", "1", "1", "0"],
    "list of None": [None, 0, 0, 0],
    "a string": "0110",
    "an object": object(),
    "a dictionary": {0: 1},
    "a set": {0, 1},
    "array.array of floats": array.array("f", [0, 0, 0, 0]),
    "__array__ of floats": OnlyArray([[0.0] * 4]),
    "__dlpack__ of floats": OnlyDLPack([[0.0] * 4]),
    "empty floats": np.zeros((2, 0)),
    "empty bools": np.zeros((0, 4), bool),
    "empty array.array of floats": array.array("d"),
    "empty __array__ of floats": OnlyArray(np.zeros((2, 0))),
    "__array__ of objects": OnlyArray(np.zeros((2, 4), object)),
    "list of arrays of objects": [np.zeros(4, object), np.ones(4, object)],
    "a float": 1.0,
    "a bool": True,
}
if BFLOAT16 is not None:
    BAD_ID_TYPES["bfloat16"] = np.zeros((2, 4), BFLOAT16)
if torch is not None:
    BAD_ID_TYPES["tensor of floats"] = torch.zeros(2, 4)
    BAD_ID_TYPES["empty tensor of floats"] = torch.zeros(2, 0)
    BAD_ID_TYPES["tensor with a gradient"] = torch.zeros(2, 4, requires_grad=True)
    BAD_ID_TYPES["tensor of bools"] = torch.zeros(2, 4, dtype=torch.bool)
    BAD_ID_TYPES["tensor of bfloat16"] = torch.zeros(2, 4, dtype=torch.bfloat16)
    BAD_ID_TYPES["tensor of float8"] = torch.zeros(2, 4).to(torch.float8_e4m3fn)
    BAD_ID_TYPES["sparse tensor"] = torch.zeros(2, 4, dtype=torch.int64).to_sparse()
    BAD_ID_TYPES["tensor elsewhere"] = torch.zeros(2, 4, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("kind", BAD_ID_TYPES)
def test_ids_of_another_type(kind: str, name: str) -> None:
    out = pattern((2, 4, 5))
    with pytest.raises(TypeError) as error:
        bert_embeddings(**small(**{name: BAD_ID_TYPES[kind]}), out=out)
    says(error, name)
    assert set(out.tobytes()) == {0xA5}


def test_token_ids_that_are_none() -> None:
    with pytest.raises(TypeError) as error:
        bert_embeddings(**small(token_ids=None))
    says(error, "token_ids")


BAD_TABLE_TYPES: dict[str, Any] = {
    "complex": np.zeros((40, 5), complex),
    "complex64": np.zeros((40, 5), np.complex64),
    "object": np.zeros((40, 5), object),
    "string": np.full((40, 5), "1"),
    "bytes": np.full((40, 5), b"1"),
    "bool": np.zeros((40, 5), bool),
    "time": np.zeros((40, 5), "m8[s]"),
    "record": np.zeros((40, 5), [("x", "f4")]),
    "bytes of two": np.zeros((40, 5), "V2"),
    "list of bools": [[True] * 5] * 40,
    "list of strings": [["0.5"] * 5] * 40,
    "list of complex": [[1j] * 5] * 40,
    "list of None": [[None] * 5] * 40,
    "list of huge integers": [[2**70] * 5] * 40,
    "None": None,
    "an object": object(),
    "a string": "table",
    "__array__ of bools": OnlyArray(np.zeros((40, 5), bool)),
    "empty bools": np.zeros((0, 5), bool),
}
if BFLOAT16 is not None:
    BAD_TABLE_TYPES["float8"] = np.zeros((40, 5), "float8_e4m3fn")
    BAD_TABLE_TYPES["int4"] = np.zeros((40, 5), "int4")
if torch is not None:
    BAD_TABLE_TYPES["tensor of bools"] = torch.zeros(40, 5, dtype=torch.bool)
    BAD_TABLE_TYPES["complex tensor"] = torch.zeros(40, 5, dtype=torch.complex64)
    BAD_TABLE_TYPES["tensor of float8"] = torch.zeros(40, 5).to(torch.float8_e4m3fn)
    BAD_TABLE_TYPES["sparse tensor"] = torch.zeros(40, 5).to_sparse()
    BAD_TABLE_TYPES["tensor elsewhere"] = torch.zeros(40, 5, device="meta")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", BAD_TABLE_TYPES)
def test_tables_of_another_type(kind: str, name: str) -> None:
    out = pattern((2, 4, 5))
    with pytest.raises(TypeError) as error:
        bert_embeddings(**small(**{name: BAD_TABLE_TYPES[kind]}), out=out)
    says(error, name)
    assert set(out.tobytes()) == {0xA5}


RAGGED: list[tuple[str, Any]] = [
    ("token_ids", [[1, 2, 3, 4], [1, 2, 3]]),
    ("token_ids", [[1, 2], 3]),
    ("token_ids", [[[1], [2]], [[3], [4, 5]]]),
    ("token_ids", [np.arange(3), np.arange(4)]),
    ("segment_ids", [[0, 0, 1, 1], [0]]),
    ("position_ids", [[0], [1, 2, 3, 4]]),
    ("token_embeddings", [[1.0, 2.0], [1.0]]),
    ("position_embeddings", [[1.0] * 5, [1.0] * 5, [1.0] * 4]),
    ("segment_embeddings", [[1.0] * 5, 2.0]),
]


@pytest.mark.parametrize(("name", "value"), RAGGED)
def test_ragged_lists(name: str, value: Any) -> None:
    out = pattern((2, 4, 5))
    with pytest.raises(ValueError, match=name):
        bert_embeddings(**small(**{name: value}), out=out)
    assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("name", ["segment_ids", "position_ids"])
@pytest.mark.parametrize(
    "shape", [(3,), (2, 3), (3, 4), (4, 2), (4, 1), (1, 2, 4), (2, 2, 4), (0,)]
)
def test_shapes_that_do_not_broadcast(shape: tuple[int, ...], name: str) -> None:
    """To the shape of `token_ids`, which never grows itself."""
    out = pattern((2, 4, 5))
    with pytest.raises(ValueError, match=name) as error:
        bert_embeddings(**small(**{name: np.zeros(shape, int)}), out=out)
    assert str(shape) in str(error.value)
    assert "(2, 4)" in str(error.value)
    assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("value", [0, np.int64(0), np.array(0), np.array(0, ">u2"), OnlyArray(0)])
def test_ids_without_an_axis(value: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        bert_embeddings(**small(**{name: value}))
    assert "()" in str(error.value) or "0-D" in str(error.value)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("shape", [(), (5,), (1, 40, 5), (40, 5, 1)])
def test_tables_of_another_dimension(shape: tuple[int, ...], name: str) -> None:
    out = pattern((2, 4, 5))
    with pytest.raises(ValueError, match=name) as error:
        bert_embeddings(**small(**{name: np.zeros(shape)}), out=out)
    assert str(shape) in str(error.value)
    assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("width", [1, 4, 6, 15])
@pytest.mark.parametrize("name", TABLES)
def test_widths_that_differ(name: str, width: int) -> None:
    """A width of 1 is not stretched as NumPy would, and 15 is what concatenating leads to."""
    out = pattern((2, 4, 5))
    for table in (np.zeros((40, width)), QuantizedTable(np.zeros((40, width), np.int8), 1.0)):
        with pytest.raises(ValueError, match=name) as error:
            bert_embeddings(**small(**{name: table}), out=out)
        text = str(error.value)
        assert f"(40, {width})" in text
        assert any(str(small()[other].shape) in text for other in TABLES if other != name)
        assert "transposed?" not in text
        assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("name", TABLES)
def test_a_transposed_table_is_recognised(name: str) -> None:
    out = pattern((2, 4, 5))
    table = small()[name].T
    others = {other: np.zeros((40, 5)) for other in TABLES if other != name}
    for turned in (table, QuantizedTable(np.zeros(table.shape, np.int8), 1.0), table.tolist()):
        with pytest.raises(ValueError, match=r"transposed\?") as error:
            bert_embeddings(**small(**{name: turned}, **others), out=out)
        says(error, name)
        assert str(table.shape) in str(error.value)
        assert set(out.tobytes()) == {0xA5}


def test_a_segment_table_of_width_first_is_recognised() -> None:
    """The confusion that the seed warns of: (768, 2)."""
    tables = [np.zeros((30522, 768), np.float16), np.zeros((512, 768)), np.zeros((768, 2))]
    with pytest.raises(ValueError, match=r"transposed\?") as error:
        bert_embeddings([101, 102], [0, 1], *tables)
    says(error, "segment_embeddings")
    assert "(768, 2)" in str(error.value)


def test_tables_without_columns() -> None:
    empty = {name: small()[name][:, :0] for name in TABLES}
    with pytest.raises(ValueError, match=r"\b0\b"):
        bert_embeddings(**small(**empty))


def test_tables_without_rows() -> None:
    none = np.zeros((0, 5))
    with pytest.raises((IndexError, ValueError)) as error:
        bert_embeddings(**small(token_embeddings=none))
    says(error, 0)
    for segment_ids in (small()["segment_ids"], None):  # None reads row 0, which is not there
        with pytest.raises((IndexError, ValueError)) as error:
            bert_embeddings(**small(segment_embeddings=none, segment_ids=segment_ids))
        says(error, 0)
    with pytest.raises(ValueError, match="position_embeddings") as error:
        bert_embeddings(**small(position_embeddings=none))
    says(error, 4, 0)


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 513), (2, 3, 12)])
def test_sequences_longer_than_the_position_table(shape: tuple[int, ...]) -> None:
    out = pattern((*shape, 5))
    arguments = small(token_ids=np.zeros(shape, int), segment_ids=None)
    with pytest.raises(ValueError, match="position_embeddings") as error:
        bert_embeddings(**arguments, out=out)
    says(error, shape[-1], 11)
    assert set(out.tobytes()) == {0xA5}
    check(arguments | {"token_ids": np.zeros((*shape[:-1], 11), int)})
    check(arguments, position_ids=[0])


LIMITS = {"token_ids": 23, "segment_ids": 3, "position_ids": 11}
BAD_IDS = [(code, value) for code in "bhilq" for value in (-1, -2, -128, 100, 127)]
BAD_IDS += [(code, value) for code in "BHILQ" for value in (100, 255)]
BAD_IDS += [(code, np.iinfo(code).max) for code in ID_CODES]
BAD_IDS += [(code, np.iinfo(code).min) for code in "hilq"]
BAD_IDS += [("q", 2**32), ("q", 2**32 + 1), ("Q", 2**32 + 1), ("q", -(2**32)), ("i", 2**16)]
BAD_IDS += [("Q", 2**63), ("Q", 2**63 + 1), ("Q", 2**64 - 23), ("h", 2**8 + 1), ("H", 2**8)]


@pytest.mark.parametrize("order", ["=", "S"], ids=["native", "swapped"])
@pytest.mark.parametrize("name", IDS)
def test_ids_out_of_range(name: str, order: Any) -> None:
    """Neither wrapped nor narrowed: reported with its place, its value and the limit."""
    for code, value in BAD_IDS:
        ids = np.zeros((2, 4), np.dtype(code).newbyteorder(order))
        ids[1, 2] = ids[1, 3] = value
        out = pattern((2, 4, 5))
        with pytest.raises(IndexError) as error:
            bert_embeddings(**small(**{name: ids}), out=out)
        says(error, f"{name}[1, 2]", value, LIMITS[name])
        assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("name", IDS)
def test_ids_at_the_limit(name: str) -> None:
    """The last row is in, the number of rows is out."""
    limit = LIMITS[name]
    ids = np.zeros((2, 4), int)
    ids[1, 3] = limit - 1
    check(small(**{name: ids}))
    ids[1, 3] = limit
    with pytest.raises(IndexError) as error:
        bert_embeddings(**small(**{name: ids}))
    says(error, f"{name}[1, 3]", limit)


@pytest.mark.parametrize("name", ["segment_ids", "position_ids"])
@pytest.mark.parametrize(
    ("shape", "place"),
    [((4,), (2,)), ((1, 4), (0, 2)), ((2, 1), (1, 0)), ((1, 1), (0, 0)), ((1,), (0,))],
)
def test_bad_ids_are_placed_in_their_own_shape(
    name: str, shape: tuple[int, ...], place: tuple[int, ...]
) -> None:
    ids = np.zeros(shape, int)
    ids[place] = 57
    with pytest.raises(IndexError) as error:
        bert_embeddings(**small(**{name: ids}))
    says(error, f"{name}[{', '.join(map(str, place))}]", 57, LIMITS[name])


@pytest.mark.parametrize("leading", range(6))
def test_bad_ids_in_many_dimensions(leading: int) -> None:
    shape = (*(2, 3, 2, 2, 2)[:leading], 4)
    place = (*(n - 1 for n in shape[:-1]), 2)
    ids = np.zeros(shape, np.int32)
    ids[place] = 57
    with pytest.raises(IndexError) as error:
        bert_embeddings(**small(token_ids=ids, segment_ids=None))
    says(error, f"token_ids[{', '.join(map(str, place))}]", 57, 23)


def test_ids_of_as_many_dimensions_as_numpy_has() -> None:
    most = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
    check(small(token_ids=np.array([3, 1]).reshape((1,) * (most - 2) + (2,)), segment_ids=None))
    with pytest.raises(ValueError, match="dim"):  # the result would have one more
        bert_embeddings(**small(token_ids=np.zeros((1,) * most, int), segment_ids=None))


@pytest.mark.parametrize("threads", [None, 1, 2, 7])
@pytest.mark.parametrize("name", IDS)
def test_the_first_bad_id_of_many(name: str, threads: int | None) -> None:
    out = pattern((3000, 10, 5))
    arguments = small(token_ids=np.zeros((3000, 10), int), segment_ids=None)
    for first in (0, 1, 14_999, 15_000, 29_998):
        ids = np.zeros((3000, 10), int)
        ids.reshape(-1)[first] = 57
        ids.reshape(-1)[first + 1 :: 7] = 58
        with pytest.raises(IndexError) as error:
            bert_embeddings(**arguments | {name: ids}, num_threads=threads, out=out)
        says(error, f"{name}[{first // 10}, {first % 10}]", 57, LIMITS[name])
    assert set(out.tobytes()) == {0xA5}


@pytest.mark.parametrize("name", IDS)
def test_bad_ids_in_lists(name: str) -> None:
    for value in (-1, 2**31, 2**32 + 1, 2**63 - 1, -(2**63)):
        with pytest.raises(IndexError) as error:
            bert_embeddings(**small(**{name: [[0, 0, value, 0], [0, 0, 0, 0]]}))
        says(error, f"{name}[0, 2]", value, LIMITS[name])
    for value in (2**63, 2**64 - 1):
        with pytest.raises(IndexError) as error:
            bert_embeddings(**small(**{name: [[value] * 4] * 2}))
        says(error, f"{name}[0, 0]", value, LIMITS[name])
    # NumPy makes floats of some of these lists, objects of others.
    for row in ([0, 2**63, 0, 0], [2**63, -1, 0, 0], [2**64] * 4, [0, -(2**63) - 1, 0, 10**30]):
        with pytest.raises((IndexError, TypeError)) as error:
            bert_embeddings(**small(**{name: [row, row]}))
        says(error, name)


Fault = tuple[int, type[Exception], Arguments, str]

# In the order in which errors are found: types, shapes, lengths, token, position, segment ids.
FAULTS: list[Fault] = [
    (0, TypeError, {"token_ids": np.zeros((2, 4))}, "token_ids"),
    (0, TypeError, {"segment_ids": np.zeros((3, 4), bool)}, "segment_ids"),
    (0, TypeError, {"position_ids": ["a", "b", "c"]}, "position_ids"),
    (0, TypeError, {"token_embeddings": np.zeros(5, complex)}, "token_embeddings"),
    (0, TypeError, {"position_embeddings": np.zeros((3, 4), bool)}, "position_embeddings"),
    (0, TypeError, {"segment_embeddings": np.zeros((2, 9), object)}, "segment_embeddings"),
    (1, ValueError, {"token_ids": 77}, "token_ids"),
    (1, ValueError, {"segment_ids": [77, 77, 77]}, "segment_ids"),
    (1, ValueError, {"position_ids": [[[77]]]}, "position_ids"),
    (1, ValueError, {"token_embeddings": np.zeros((1, 6))}, "token_embeddings"),
    (1, ValueError, {"position_embeddings": np.zeros(5)}, "position_embeddings"),
    (1, ValueError, {"segment_embeddings": np.zeros((1, 4))}, "segment_embeddings"),
    (2, ValueError, {"position_embeddings": np.zeros((3, 5))}, "3"),
    (3, IndexError, {"token_ids": [[0, 0, 0, 0], [0, -7, 0, 77]]}, "token_ids[1, 1]"),
    (4, IndexError, {"position_ids": [0, 0, 11, 77]}, "position_ids[2]"),
    (5, IndexError, {"segment_ids": [[77], [0]]}, "segment_ids[0, 0]"),
]


def pairs_of_faults() -> Iterator[tuple[Fault, Fault]]:
    for first, second in itertools.combinations(FAULTS, 2):
        given_positions = "position_ids" in first[2] | second[2]
        lengths = 2 in (first[0], second[0])
        if lengths and given_positions:  # given positions lift the limit on length
            continue
        if first[0] < second[0] and not first[2].keys() & second[2].keys():
            yield first, second


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f[0]} {f[3]}")
def test_one_fault(fault: Fault) -> None:
    _, kind, changes, words = fault
    out = pattern((2, 4, 5))
    with pytest.raises(kind) as error:
        bert_embeddings(**small(**changes), out=out)
    says(error, words)
    assert set(out.tobytes()) == {0xA5}


def test_of_two_faults_the_earlier_is_reported() -> None:
    pairs = list(pairs_of_faults())
    assert len(pairs) > 60
    for (_, kind, changes, words), (_, _, later, _) in pairs:
        out = pattern((2, 4, 5))
        with pytest.raises(kind) as error:
            bert_embeddings(**small(**changes | later), out=out)
        says(error, words)
        assert set(out.tobytes()) == {0xA5}


def test_a_call_after_an_error_is_right() -> None:
    for _, kind, changes, _ in FAULTS:
        with pytest.raises(kind):
            bert_embeddings(**small(**changes))
        check(small())


# Memory

LARGE = 2**28  # bytes of a table, never touched as a whole
MUCH = 2**25


def large_table(kind: str, how: str) -> tuple[Array, int]:
    """A table of about LARGE bytes that the system has not yet had to provide, and its rows."""
    dtype, width = dtype_of(kind), 64
    rows = LARGE // (width * dtype.itemsize)
    if how == "contiguous":
        table = np.zeros((rows, width), dtype)
    elif how == "reversed_rows":
        table = np.zeros((rows, width), dtype)[::-1]
    elif how == "padded_rows":
        table = np.zeros((rows, width + 3), dtype)[:, 1:-2]
    elif how == "misaligned":
        table = np.zeros(LARGE + 1, np.uint8)[1:].view(dtype).reshape(rows, width)
    else:
        table = np.zeros(rows, [("tag", "u1"), ("row", dtype, (width,)), ("rest", "u2")])["row"]
    assert table.shape == (rows, width)
    return table, rows


@pytest.mark.parametrize("how", ROWS_IN_PLACE)
@pytest.mark.parametrize("kind", FLOATS)
def test_tables_are_read_in_place(kind: str, how: str, peak_growth: Growth) -> None:
    table, rows = large_table(kind, how)
    ids = [0, 1, rows // 2, rows - 1]
    for row in ids:
        table[row] = row % 29
    rest = np.zeros((4, 64), np.float32)
    results = {}
    for dtype in (np.float32, np.float64):

        def call(dtype: Any = dtype) -> None:
            results[dtype, 0] = bert_embeddings(ids, None, table, rest, rest, dtype=dtype)
            results[dtype, 1] = bert_embeddings(
                [0] * 4, None, rest, table, rest, dtype=dtype, position_ids=ids
            )
            results[dtype, 2] = bert_embeddings([0] * 4, ids, rest, rest, table, dtype=dtype)

        assert peak_growth(call) < MUCH
    for result in results.values():
        assert result.tolist() == [[float(row % 29)] * 64 for row in ids]


def test_the_measure_of_memory_sees_a_copy(peak_growth: Growth) -> None:
    table, _ = large_table("float32", "padded_rows")
    assert peak_growth(lambda: np.ascontiguousarray(table)) > LARGE * 0.9
    assert peak_growth(lambda: table[: 2**19].astype(np.float64)) > MUCH


@pytest.mark.parametrize("kind", FLOATS)
def test_a_table_of_endless_rows_is_read_in_place(kind: str) -> None:
    rng = np.random.default_rng(41)
    row = table_of(rng, 1, 5, kind)
    endless = np.broadcast_to(row, (2**40, 5))
    ids = [0, 2**40 - 1, 2**33 + 5]
    zero = np.full((3, 5), -0.0, np.float16)
    result = bert_embeddings(ids, None, endless, zero, zero, dtype=dtype_of(kind))
    assert_same_bits(result, np.array(np.broadcast_to(row, (3, 5))))
    with pytest.raises(IndexError) as error:
        bert_embeddings([0, 2**40], None, endless, zero, zero)
    says(error, "token_ids[1]", 2**40)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("how", ["contiguous", "padded"])
def test_quantized_tables_are_never_expanded(how: str, kind: Any, peak_growth: Growth) -> None:
    rows = LARGE // 256
    values = np.zeros((rows, 256), kind) if how == "contiguous" else np.zeros((rows, 300), kind)
    values = values[:, :256]
    values[[0, rows - 1]] = 3
    rest = np.zeros((2, 256), np.float32)
    results = []

    def call() -> None:
        table = QuantizedTable(values, np.float32(0.5), kind(1))
        for dtype in (np.float32, np.float64):
            ids = [0, rows - 1]
            results.append(bert_embeddings(ids, None, table, rest, rest, dtype=dtype))

    assert peak_growth(call) < MUCH
    for result in results:
        assert result.tolist() == [[1.0] * 256] * 2


@needs_torch
@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_tensors_are_read_in_place(kind: str, gradient: bool, peak_growth: Growth) -> None:
    holder, rows = large_table({"bfloat16": "float16"}.get(kind, kind), "contiguous")
    table = torch.from_numpy(holder).view(getattr(torch, kind))
    table[rows - 1] = 3
    table.requires_grad_(gradient)
    rest = np.zeros((2, 64), np.float32)
    results = []
    grown = peak_growth(
        lambda: results.append(bert_embeddings([0, rows - 1], None, table, rest, rest))
    )
    assert grown < MUCH
    assert results[0].tolist() == [[0.0] * 64, [3.0] * 64]


@pytest.mark.parametrize("how", ["fortran", "sliced", "swapped"])
def test_other_layouts_are_copied_once(how: str, peak_growth: Growth) -> None:
    width, rows = 64, MUCH // 256
    if how == "fortran":
        table = np.zeros((rows, width), np.float32, order="F")
    elif how == "sliced":
        table = np.zeros((rows, 2 * width), np.float32)[:, ::2]
    else:
        table = np.zeros((rows, width), np.dtype(np.float32).newbyteorder("S"))
    table[5] = 2.5
    rest = np.zeros((2, width))
    results = []
    grown = peak_growth(lambda: results.append(bert_embeddings([0, 5], None, table, rest, rest)))
    assert grown < 1.5 * table.nbytes
    assert results[0].tolist() == [[0.0] * width, [2.5] * width]


@pytest.mark.parametrize("position_ids", [False, True], ids=["counted", "given"])
@pytest.mark.parametrize("shape", [(1024,), (1, 1024), (16384, 1), (1, 1)])
@pytest.mark.parametrize("code", "Bhiq")
def test_broadcast_ids_are_not_expanded(
    code: str, shape: tuple[int, ...], position_ids: bool, peak_growth: Growth
) -> None:
    """2**24 tokens of two bytes each; expanded ids would take 16 to 128 MiB."""
    full = (16384, 1024)
    rng = np.random.default_rng(43)
    token_ids = np.broadcast_to(np.zeros(1, np.int64), full)
    arguments: Arguments = {
        "token_ids": token_ids,
        "segment_ids": rng.integers(0, 3, shape).astype(code),
        "token_embeddings": np.ones((1, 1), np.float16),
        "position_embeddings": np.arange(1024, dtype=np.float16)[:, None],
        "segment_embeddings": np.array([[0], [0.25], [0.5]], np.float16),
    }
    positions = np.arange(1024)
    if position_ids:
        arguments["position_ids"] = rng.integers(0, 100, shape).astype(code)
        positions = arguments["position_ids"]
    out = np.zeros((*full, 1), np.float16)
    out.fill(1)
    options = {"out": out, "dtype": np.float16, "num_threads": 1}
    assert peak_growth(lambda: bert_embeddings(**arguments, **options)) < 2**23
    expected = 1 + (positions + arguments["segment_ids"] * np.float32(0.25))
    expected = np.broadcast_to(expected.astype(np.float16), full)
    assert (out[..., 0] == expected).all()


IN_PLACE_IDS: dict[str, Callable[[], Array]] = {
    "contiguous": lambda: np.zeros((16384, 1024), np.int64),
    "int32": lambda: np.zeros((16384, 1024), np.int32),
    "transposed": lambda: np.zeros((1024, 16384), np.int32).T,
    "sliced": lambda: np.zeros((16384, 2048), np.int32)[:, ::2],
    "backwards": lambda: np.zeros((16384, 1024), np.int64)[::-1, ::-1],
    "read-only": lambda: read_only(np.zeros((16384, 1024), np.int64)),
    "object with __array__": lambda: np.zeros((16384, 1024), np.int64),
    "memoryview": lambda: np.zeros((16384, 1024), np.int64),
    "DLPack": lambda: np.zeros((16384, 1024), np.int64),
    "tensor": lambda: np.zeros((16384, 1024), np.int64),
}


class SharesArray:
    """Hands out its array itself, not a copy."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._values


class SharesDLPack(OnlyDLPack):
    """Hands out its own memory."""

    def __init__(self, values: Array) -> None:
        self._values = values


@pytest.mark.parametrize("how", IN_PLACE_IDS)
def test_ids_are_read_in_place(how: str, peak_growth: Growth) -> None:
    """64 or 128 MiB of ids; a copy of either would show."""
    ids: Any = IN_PLACE_IDS[how]()
    if how == "object with __array__":
        ids = SharesArray(ids)
    elif how == "memoryview":
        ids = memoryview(ids)
    elif how == "DLPack":
        ids = SharesDLPack(ids)
    elif how == "tensor":
        if torch is None:
            pytest.skip("PyTorch is not installed")
        ids = torch.from_numpy(ids)
    table = np.ones((1, 1), np.float16)
    out = pattern((16384, 1024, 1), np.float16)
    arguments = (ids, None, table, np.ones((1024, 1), np.float16), table)
    options: Arguments = {"dtype": np.float16, "out": out, "num_threads": 1}
    assert peak_growth(lambda: bert_embeddings(*arguments, **options)) < MUCH
    assert (out == 3).all()


TOO_LARGE = """
    import numpy as np
    from bertinput import bert_embeddings
    strided = np.lib.stride_tricks.as_strided
    shape, code, width = {shape}, {code!r}, {width}
    ids = strided(np.zeros(1, code), shape, (0,) * len(shape))
    tables = [np.zeros((n, width)) for n in (2, 4, 2)]
    for segment_ids in (None, ids, [0]):
        for dtype in ("float64", "float16"):
            for num_threads in (None, 2):
                options = dict(dtype=dtype, num_threads=num_threads)
                try:
                    bert_embeddings(ids, segment_ids, *tables, **options)
                except (MemoryError, ValueError) as error:
                    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("shape", "code", "width"),
    [
        ((2**45, 4), "i8", 8),  # addressable, but more than any machine's memory
        ((2**30, 2**15, 4), "u1", 16),
        ((2**57, 4), "i8", 4),  # the ids just fit the address space, the result does not
        ((2**60, 4), "i1", 3),
        ((2**30, 2**30, 2), "i2", 1000),
        ((2**59,), "i8", 1),
    ],
)
def test_results_too_large(
    shape: tuple[int, ...], code: str, width: int, fresh_python: Python
) -> None:
    """Refused at once: walking the ids first would never end."""
    printed = fresh_python(TOO_LARGE.format(shape=shape, code=code, width=width)).split()
    assert len(printed) == 12
    assert set(printed) <= {"MemoryError", "_ArrayMemoryError", "ValueError"}


# Threads of the caller, forks, other people's processes

RACE = """
    import threading
    import numpy as np
    from bertinput import bert_embeddings

    name, bad, code, threads = {name!r}, {bad}, {code!r}, {threads}
    table = np.ones((64, 16), np.float32)
    ids = dict(token_ids=np.zeros((512, 64), code), segment_ids=np.zeros((512, 64), code),
               position_ids=np.zeros((512, 64), code))
    target = ids[name]
    stop = threading.Event()

    def rewrite():
        flat, k = target.reshape(-1), 0
        while not stop.is_set():
            for _ in range(200):
                k = (k * 5 + 12345) % flat.size
                flat[k] = bad
                flat[k] = 0
            target.fill(bad)
            target.fill(0)

    out = np.empty((512, 64, 16), np.float32)
    options = dict(dtype="float32", num_threads=threads, out=out)

    def call():
        bert_embeddings(ids["token_ids"], ids["segment_ids"], table, table, table,
                        position_ids=ids["position_ids"], **options)

    writer = threading.Thread(target=rewrite)
    writer.start()
    outcomes = dict(done=0, refused=0)
    try:
        for _ in range(300):
            try:
                call()
                outcomes["done"] += 1
            except IndexError as error:
                assert name in str(error), error
                outcomes["refused"] += 1
    finally:
        stop.set()
        writer.join()
    call()
    assert (out == 3).all()
    target[511, 63] = bad
    try:
        call()
    except IndexError as error:
        assert name + "[511, 63]" in str(error), error
    else:
        raise AssertionError("the range check was skipped")
    print(sum(outcomes.values()))
"""


@pytest.mark.parametrize(
    ("name", "bad", "code", "threads"),
    [
        ("token_ids", 2**40, "q", 1),
        ("token_ids", -(2**40), "q", 2),
        ("token_ids", 2**31 - 1, "i", 2),
        ("segment_ids", 2**40, "q", 2),
        ("position_ids", 2**40, "q", 2),
        ("token_ids", 2**63, "Q", 1),
        ("segment_ids", 2**15 - 1, ">i2", 2),
    ],
)
def test_ids_rewritten_during_calls(
    name: str, bad: int, code: str, threads: int, fresh_python: Python
) -> None:
    printed = fresh_python(RACE.format(name=name, bad=bad, code=code, threads=threads))
    assert printed.split() == ["300"]


def test_tables_rewritten_during_calls(fresh_python: Python) -> None:
    printed = fresh_python("""
        import threading
        import numpy as np
        from bertinput import bert_embeddings

        table = np.ones((64, 64), np.float32)
        ids = np.zeros((256, 64), int)
        stop = threading.Event()

        def rewrite():
            while not stop.is_set():
                table.fill(np.nan)
                table.fill(1)

        writer = threading.Thread(target=rewrite)
        writer.start()
        shapes = set()
        try:
            for turn in range(100):
                options = dict(dtype="float32", num_threads=1 + turn % 2)
                shapes.add(bert_embeddings(ids, ids, table, table, table, **options).shape)
        finally:
            stop.set()
            writer.join()
        assert (bert_embeddings(ids, ids, table, table, table) == 3).all()
        print(shapes)
    """)
    assert printed.strip() == "{(256, 64, 64)}"


def test_calls_from_many_threads() -> None:
    rng = np.random.default_rng(47)
    arguments: Arguments = {
        "token_embeddings": table_of(rng, 301, 96, "float32"),
        "position_embeddings": table_of(rng, 128, 96, "float32"),
        "segment_embeddings": table_of(rng, 2, 96, "float32"),
    }
    batches = [
        {"token_ids": rng.integers(0, 301, shape), "segment_ids": rng.integers(0, 2, shape)}
        for shape in [(3,), (1, 128), (16, 128), (64, 100)] * 2
    ]
    expected = [reference_sum(**batch, **arguments, dtype=np.float32) for batch in batches]

    def work(number: int) -> None:
        for turn in range(8):
            k = (number + turn) % len(batches)
            options = {"dtype": np.float32, "num_threads": (None, 1, 2)[turn % 3]}
            assert_same_bits(bert_embeddings(**batches[k], **arguments, **options), expected[k])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, n) for n in range(16)]:
            done.result()


@needs_fork
@pytest.mark.parametrize("threads", [None, 1, 2])
def test_a_forked_child_computes_too(threads: int | None, fresh_python: Python) -> None:
    printed = fresh_python(f"""
        import os, signal, warnings
        import numpy as np
        from bertinput import bert_embeddings

        rng = np.random.default_rng(0)
        tables = [rng.standard_normal((n, 256)) for n in (100, 128, 2)]
        ids = rng.integers(0, 100, (64, 128))

        def call(num_threads):
            return bert_embeddings(ids, ids % 2, *tables, num_threads=num_threads).tobytes()

        expected = call(2)
        warnings.simplefilter("ignore")  # forking with threads alive is what is tried
        for _ in range(3):
            child = os.fork()
            if not child:
                signal.alarm(60)  # end a child that hangs
                ok = call({threads}) == expected and call(2) == expected
                os._exit(0 if ok else 3)
            print(os.waitpid(child, 0)[1])
            assert call({threads}) == expected
    """)
    assert printed.split() == ["0", "0", "0"]


@needs_linux
def test_import_and_small_calls_start_no_thread(fresh_python: Python) -> None:
    printed = fresh_python("""
        import os
        import numpy as np

        def count():
            return len(os.listdir("/proc/self/task"))

        before = count()
        from bertinput import bert_embeddings
        after_import = count()
        tables = [np.ones((n, 384), np.float32) for n in (100, 128, 2)]
        for tokens in (1, 8, 32):
            bert_embeddings(np.zeros((1, tokens), int), None, *tables, dtype="float32")
        print(after_import - before, count() - before)
    """)
    assert printed.split() == ["0", "0"]


@needs_linux
@pytest.mark.parametrize("cpus", ["all", "one"])
def test_threads_are_no_more_than_allowed(cpus: str, fresh_python: Python) -> None:
    """A given number is a limit; without one the CPUs of this process are."""
    printed = fresh_python(f"""
        import os
        import numpy as np
        from bertinput import bert_embeddings

        def count():
            return len(os.listdir("/proc/self/task"))

        if {cpus!r} == "one":
            os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
        before = count()
        tables = [np.ones((n, 512), np.float32) for n in (100, 512, 2)]
        ids = np.zeros((64, 512), int)
        started = []
        for num_threads in (1, None, 2, 3):
            bert_embeddings(ids, None, *tables, dtype="float32", num_threads=num_threads)
            started.append(count() - before)
        print(*started, len(os.sched_getaffinity(0)))
    """)
    one, automatic, two, three, available = map(int, printed.split())
    assert one == 0
    assert automatic <= available - 1
    assert two <= max(automatic, 1)
    assert three <= max(automatic, 2)


def test_import_and_calls_leave_the_process_as_it_was(fresh_python: Python) -> None:
    printed = fresh_python("""
        import ctypes, os, sys
        from itertools import count, takewhile
        import numpy as np
        try:
            from numpy._core.multiarray import get_handler_name
        except ImportError:
            from numpy.core.multiarray import get_handler_name

        def environ():  # as compiled code sees it
            try:
                pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
            except (AttributeError, TypeError, ValueError):
                return None
            return sorted(takewhile(bool, (pointer[i] for i in count())))

        def state():
            name, keys, *rest = np.random.get_state()
            return (dict(os.environ), environ(), np.geterr(), np.get_printoptions(),
                    keys.tolist(), rest, get_handler_name())

        before = state()
        import bertinput
        assert state() == before
        for package in ("ml_dtypes", "torch", "transformers", "onnx", "safetensors"):
            assert package not in sys.modules, package
        tables = [np.ones((n, 768)) for n in (100, 512, 2)]
        for shape in ((1,), (16, 512)):
            for num_threads in (None, 1, 2):
                ids = np.zeros(shape, int)
                out = bertinput.bert_embeddings(ids, None, *tables, num_threads=num_threads)
                assert state() == before
                for bad in (ids - 1, ids.astype(float)):
                    try:
                        bertinput.bert_embeddings(bad, None, *tables, num_threads=num_threads)
                    except (IndexError, TypeError):
                        pass
                    assert state() == before
        assert "torch" not in sys.modules
        print("same")
    """)
    assert printed.split() == ["same"]


# Without ml_dtypes


def test_bfloat16_results_need_the_extra(fresh_python: Python) -> None:
    printed = fresh_python("""
        import sys
        sys.modules["ml_dtypes"] = None  # importing it fails
        import numpy as np
        from bertinput import bert_embeddings

        tables = [np.ones((3, 4), np.float32)] * 3
        assert bert_embeddings([0, 1], [0, 0], *tables, dtype="float16").tolist() == [[3.0] * 4] * 2
        try:
            bert_embeddings([0, 1], [0, 0], *tables, dtype="bfloat16")
        except ImportError as error:
            print(error)
    """)
    requirements = importlib.metadata.requires("bertinput") or []
    extras = [
        name
        for requirement in requirements
        if re.match(r"ml[-_.]dtypes\b", requirement, re.IGNORECASE)
        for name in re.findall(r"""extra\s*==\s*['"]([\w.-]+)['"]""", requirement)
    ]
    assert extras, "no extra brings ml_dtypes"
    assert any(f"bertinput[{name}]" in printed for name in extras), printed


@needs_torch
def test_bfloat16_tensors_do_not_need_the_extra(fresh_python: Python) -> None:
    printed = fresh_python("""
        import sys
        sys.modules["ml_dtypes"] = None
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
        import numpy as np
        from bertinput import bert_embeddings

        table = torch.tensor([[0.1, -3.0], [7.0, 1e30]], dtype=torch.bfloat16)
        exact = table.to(torch.float32).numpy()
        zero = np.zeros((2, 2), np.float32)
        result = bert_embeddings([0, 1], None, table, zero, zero, dtype="float32")
        print(result.dtype, (result == exact).all())
    """)
    assert printed.split() == ["float32", "True"]


@pytest.mark.parametrize("ids", [[1, True], [[0, 1], [np.True_, 0]], ([1, 2], (False, 2))], ids=str)
def test_a_bool_among_integers_is_no_id(ids: Any) -> None:
    with pytest.raises(TypeError, match="token_ids must be integers, and holds a bool"):
        bert_embeddings(**small(token_ids=ids, segment_ids=None))


@pytest.mark.parametrize("name", ["token_ids", "token_embeddings"])
def test_a_masked_array_is_refused(name: str) -> None:
    masked = np.ma.masked_array(small()[name])
    with pytest.raises(TypeError, match=f"{name} is a masked array"):
        bert_embeddings(**small(**{name: masked}))


def test_every_choice_of_transposed_tables_is_said() -> None:
    turned = {name: np.zeros((rows, 7)).T for name, rows in zip(TABLES, (30, 11, 3), strict=True)}
    with pytest.raises(ValueError, match="transposed") as error:
        bert_embeddings(**small(**turned))
    assert all(name in str(error.value) for name in TABLES)


class Failing:
    """Something whose own conversion fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("device lost"), OverflowError("too far")], ids=str)
def test_an_error_inside_a_conversion_keeps_its_words(error: Exception) -> None:
    with pytest.raises(ValueError, match=f"token_ids cannot be read as an array: {error}"):
        bert_embeddings(**small(token_ids=Failing(error)))
