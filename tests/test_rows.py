"""The kernels: every value of the short types, groups of rows, large results, short runs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray
from reference import BFLOAT16, bits

from bertinput import BertEmbeddings, QuantizedTable, _core, bert_embeddings
from bertinput.tables import BFloat16Table

Python = Callable[..., str]

HALVES = [
    "float16",
    pytest.param(
        "bfloat16",
        marks=pytest.mark.skipif(BFLOAT16 is None, reason="bfloat16 results need ml_dtypes"),
    ),
]
HALF_NAMES = ["float16"] + ([] if BFLOAT16 is None else ["bfloat16"])


def dtype_of(half: str) -> np.dtype[Any]:
    """The NumPy dtype of that name."""
    if half != "bfloat16":
        return np.dtype(half)
    assert BFLOAT16 is not None
    return BFLOAT16


def on_every_instruction_set(python: Python, code: str) -> list[list[str]]:
    """What the code prints in a process of its own, line by line, for each instruction set."""
    here = str(Path(__file__).parent)
    found = f"import sys; sys.path.insert(0, {here!r}); from test_rows import *; {code}"
    return [python(found, BERTINPUT_ISA=name).splitlines() for name in _core.instruction_sets()]


def digest(array: NDArray[Any]) -> str:
    """A hash of the bits, in which all NaN are one."""
    numbers = np.where(np.isnan(array), 0, array)
    return hashlib.sha256(numbers.view(np.uint8)).hexdigest()


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether shapes, NaN and the bits of all other elements are the same."""
    return bool(
        a.shape == b.shape
        and a.dtype == b.dtype
        and ((bits(a) == bits(b)) | (np.isnan(a) & np.isnan(b))).all()
    )


# Every value of the short types


def through(table: NDArray[Any], dtype: DTypeLike, width: int) -> NDArray[Any]:
    """The table's values, read and written once by the kernel: what is added is -0.0."""
    rows = table.reshape(-1, width)
    nothing = np.full((1, width), -0.0, dtype=table.dtype)
    ids = np.arange(len(rows))
    zeros = np.zeros_like(ids)
    result = bert_embeddings(ids, zeros, rows, nothing, nothing, position_ids=zeros, dtype=dtype)
    return result.reshape(table.shape)


READ_WIDTHS = [1, 64, 4096]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("width", READ_WIDTHS)
def test_every_value_is_read_exactly(half: str, wide: type, width: int) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(half))
    with np.errstate(invalid="ignore"):
        expected = values.astype(wide)
    result = through(values, wide, width)
    numbers = ~np.isnan(expected)
    unsigned = np.uint32 if wide is np.float32 else np.uint64
    assert np.array_equal(np.isnan(result), ~numbers)
    assert np.array_equal(result[numbers].view(unsigned), expected[numbers].view(unsigned))


ROUND_WIDTHS = [1, 15, 16, 71]  # element by element, and many by one instruction


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("width", ROUND_WIDTHS)
@np.errstate(over="ignore", invalid="ignore")
def test_every_value_and_every_midpoint_is_rounded_to_nearest_even(
    half: str, wide: type, width: int
) -> None:
    finite = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(half)).astype(np.float64)
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
    values = np.resize(values, -(-len(values) // width) * width)  # whole rows

    result = through(values, dtype_of(half), width).astype(np.float64)

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


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("width", ROUND_WIDTHS)
def test_what_is_no_finite_number_is_rounded_to_its_kind(half: str, width: int) -> None:
    """Infinities, numbers far too large or small, NaN with every single bit of their payload."""
    payloads = np.uint32(0x7F800000) | np.uint32(1) << np.arange(23, dtype=np.uint32)
    special = np.array([np.inf, 3.4e38, 1e-45, 1e-40, 0.0], np.float32)
    values = np.concatenate([payloads.view(np.float32), special])
    values = np.concatenate([values, -values])
    values = np.resize(values, -(-len(values) // width) * width)
    result = through(values, dtype_of(half), width).astype(np.float32)
    assert np.array_equal(np.isnan(result), np.isnan(values))
    numbers = ~np.isnan(values)
    assert np.array_equal(np.signbit(result[numbers]), np.signbit(values[numbers]))
    large = np.abs(values) > 1
    assert np.isinf(result[numbers & large]).all()
    assert (np.abs(result[numbers & ~large]) < 1e-38).all()


def every_value() -> None:
    """The three tests above, with the instruction set that this process was started with."""
    for half in HALF_NAMES:
        for wide in (np.float32, np.float64):
            for width in READ_WIDTHS:
                test_every_value_is_read_exactly(half, wide, width)
            for width in ROUND_WIDTHS:
                test_every_value_and_every_midpoint_is_rounded_to_nearest_even(half, wide, width)
        for width in ROUND_WIDTHS:
            test_what_is_no_finite_number_is_rounded_to_its_kind(half, width)
    print(_core.build_facts()["instruction_set"])


def test_every_instruction_set_reads_and_rounds_every_value(fresh_python: Python) -> None:
    printed = on_every_instruction_set(fresh_python, "every_value()")
    assert printed == [[name] for name in _core.instruction_sets()]


# LayerNorm's groups of rows


def table_of(rng: np.random.Generator, kind: str, rows: int, width: int) -> Any:
    """A random table."""
    if kind in ("int8", "uint8"):
        values = rng.integers(0, 256, (rows, width)).astype(np.uint8).view(kind)
        return QuantizedTable(values, rng.random(rows, np.float32), values[:, 0])
    numbers = rng.standard_normal((rows, width))
    if kind == "bfloat16":
        upper = numbers.astype(np.float32).view(np.uint32) >> 16
        return BFloat16Table(upper.astype(np.uint16))
    return numbers.astype(kind)


def unlike_rows(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    """Rows that go different ways through LayerNorm: one pass, two, three, the long way."""
    usual = rng.standard_normal((4, width))
    rows = [
        *usual[:2],
        10 + 0.01 * usual[0],  # of whose variance the first pass is 6 % off
        10 + 0.01 * usual[1],
        1000 + 1e-4 * usual[2],  # all but constant in float32
        1e6 + 100 * usual[3],
        np.full(width, 7.0),
        np.zeros(width),
        1e25 * usual[0],  # squares overflow float32
        3e38 * np.sign(usual[1]),
        1e-25 * usual[2],  # squares vanish
        1e-44 * usual[3],  # subnormal
    ]
    for special in (np.nan, np.inf, -np.inf):
        rows.append(usual[0].copy())
        rows[-1][width // 2] = special
    with np.errstate(under="ignore"):
        return np.array(rows).astype(np.float32)


def by_formula(
    rows: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, eps: float
) -> NDArray[np.float64]:
    """LayerNorm in float64."""
    wide = rows.astype(np.float64)
    with np.errstate(all="ignore"):
        centred = wide - wide.mean(axis=-1, keepdims=True)
        centred -= centred.mean(axis=-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        result: NDArray[np.float64] = unit * weight + (0 if bias is None else bias)
    return result


Stage = Callable[..., NDArray[Any]]


def some(stage: Stage, ids: NDArray[Any], rows: slice, **more: Any) -> NDArray[Any]:
    """The stage for some of the tokens, each with a segment and a position that hang on its id."""
    chosen = ids[rows]
    return stage(chosen, chosen % 3, position_ids=chosen % 3, **more)


def group_cases() -> Iterator[tuple[int, list[str], bool]]:
    """Width, types of the tables beside the token table, whether there is a bias."""
    yield 1, [], False
    yield 5, ["float32"], True
    yield 31, ["float16"], False
    yield 32, ["float32", "float32"], True
    yield 33, ["float32", "int8"], False
    yield 384, ["float16", "bfloat16"], True
    yield 2049, [], True


def compare_groups() -> None:
    """Compare rows in groups with rows alone, and these with the formula; print digests."""
    for width, others, biased in group_cases():
        rng = np.random.default_rng(width)
        rows = unlike_rows(rng, width)
        weight, bias = rng.standard_normal((2, width)).astype(np.float32)
        norm = weight, bias if biased else None, 1e-12
        layer = BertEmbeddings(
            rows, *(table_of(rng, kind, 3, width) for kind in others), layer_norm=norm
        )
        each = np.arange(len(rows))
        # every ordered pair of kinds in every two neighbouring places of a group of four
        pairs = np.array(list(itertools.product(each, repeat=2)))
        rest = np.tile([0, 1], (len(pairs), 1))
        groups = [[pairs, rest], [rest[:, :1], pairs, rest[:, 1:]], [rest, pairs]]
        ids = np.concatenate([np.concatenate(group, axis=1) for group in groups]).reshape(-1)
        for dtype in ("float32", "float64", "float16"):
            alone = np.concatenate([some(layer, each, slice(k, k + 1), dtype=dtype) for k in each])
            expected, told = alone[ids], (width, dtype)
            assert same(some(layer, ids, slice(None), dtype=dtype), expected), told
            for count in range(1, 10):  # the last group is seldom full
                for start in range(0, len(ids), 97):
                    part = slice(start, start + count)
                    assert same(some(layer, ids, part, dtype=dtype), expected[part]), told
            print(*told, digest(alone))

        alone = np.concatenate([some(layer, each, slice(k, k + 1)) for k in each])
        exact = by_formula(some(layer.sum, each, slice(None)), *norm)
        assert np.array_equal(np.isnan(alone), np.isnan(exact)), width
        finite = ~np.isnan(exact).any(axis=1)
        assert finite.sum() == len(rows) - 3, width
        error = np.abs(alone - exact)[finite].max(axis=1)
        assert (error <= 2e-6 * np.abs(exact)[finite].max(axis=1)).all(), width


def test_a_row_has_the_same_bits_in_any_group_of_rows(fresh_python: Python) -> None:
    """And on every instruction set; what it is, is held to the formula."""
    first, *others = on_every_instruction_set(fresh_python, "compare_groups()")
    assert len(set(first)) == 3 * len(list(group_cases()))
    assert all(printed == first for printed in others)


# Large results, which are written past the caches

STREAMED, LARGE = 12 << 20, 14 << 20  # bytes from which on that happens, and clearly above
MARK = 0xA5


def large_cases() -> Iterator[tuple[list[str], str, int]]:
    """Types of one to three tables, the result's type, width."""
    yield ["float32"], "float32", 1000
    yield ["float32"] * 2, "float32", 31
    yield ["float32"] * 3, "float32", 768
    yield ["float16"] * 3, "float32", 33
    yield ["bfloat16"] * 2, "float32", 24
    yield ["int8"] * 3, "float32", 2050
    yield ["uint8"], "float32", 14
    yield ["float64"] * 3, "float64", 768
    yield ["float64"], "float64", 9
    yield ["float32"] * 2, "float64", 1023
    yield ["float16"], "float64", 32
    yield ["float32", "float16", "int8"], "float32", 1024
    yield ["float64", "uint8"], "float64", 130
    yield ["float32"] * 3, "float16", 769  # rounded, so written as others are


def compare_large() -> None:
    """Compare large results, at several alignments, with small ones; print digests."""
    memory = np.empty(LARGE + (1 << 16), np.uint8)
    line = -memory.ctypes.data % 64 + 64
    for kinds, dtype, width in large_cases():
        rng = np.random.default_rng(width)
        tables = [table_of(rng, kind, 60, width) for kind in kinds]
        weight, bias = rng.standard_normal((2, width))
        norm = weight, bias if width % 2 else None, 1e-12
        layer = BertEmbeddings(*tables, layer_norm=norm)
        row_bytes = width * np.dtype(dtype).itemsize
        tokens, edge = -(-LARGE // row_bytes), -(-STREAMED // row_bytes)
        ids = rng.integers(0, 60, tokens)
        for name, stage in (("sum", layer.sum), ("norm", layer)):
            told = "+".join(kinds), dtype, width, name
            step = LARGE // 16 // row_bytes
            expected = np.concatenate(
                [some(stage, ids, slice(k, k + step), dtype=dtype) for k in range(0, tokens, step)]
            )
            for offset, count, threads in [
                (0, edge, 1),  # at a cache line
                (0, edge - 1, 2),
                (16, tokens, 2),
                (np.dtype(dtype).itemsize, tokens, 1),
                (1, tokens, 2),  # no element where its type wants it
            ]:
                inside = slice(line + offset, line + offset + count * row_bytes)
                memory[: inside.start] = memory[inside.stop :] = MARK
                out = memory[inside].view(dtype).reshape(count, width)
                some(stage, ids, slice(count), dtype=dtype, out=out, num_threads=threads)
                assert np.array_equal(memory[inside], expected[:count].view(np.uint8).ravel()), told
                assert (memory[: inside.start] == MARK).all(), told
                assert (memory[inside.stop :] == MARK).all(), told
            print(*told, digest(expected))


def test_large_results_are_the_same_bits_as_small_ones(fresh_python: Python) -> None:
    """At every alignment, on every instruction set; and nothing beside them is written."""
    first, *others = on_every_instruction_set(fresh_python, "compare_large()")
    assert len(set(first)) == 2 * len(list(large_cases()))
    assert all(printed == first for printed in others)


def compare_large_groups() -> None:
    """Unlike rows, normalised straight into a large result; print a digest."""
    rng = np.random.default_rng(9)
    rows = unlike_rows(rng, 768)
    weight, bias = rng.standard_normal((2, 768))
    layer = BertEmbeddings(rows, layer_norm=(weight, bias, 1e-12))
    ids = rng.integers(0, len(rows), LARGE // (768 * 4) + 1)
    alone = layer(np.arange(len(rows)))
    memory = np.empty(LARGE + (1 << 16), np.uint8)
    for offset in (0, 4):
        start = -memory.ctypes.data % 64 + offset
        out = memory[start : start + ids.size * 768 * 4].view(np.float32).reshape(-1, 768)
        assert same(layer(ids, out=out), alone[ids])
    print(digest(alone))


def test_unlike_rows_in_a_large_result(fresh_python: Python) -> None:
    """The few that go the long way through LayerNorm lie among those that are streamed."""
    first, *others = on_every_instruction_set(fresh_python, "compare_large_groups()")
    assert len(first) == 1
    assert all(printed == first for printed in others)


# Short runs, whose ids are checked on the way


@pytest.mark.parametrize("tokens", [1, 4, 127, 128, 129, 300])
@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize("normed", [False, True])
def test_a_bad_id_is_found_before_anything_is_written(
    tokens: int, threads: int | None, normed: bool
) -> None:
    """The first bad token id, then the first bad position, then segment, whatever their places."""
    rng = np.random.default_rng(tokens)
    tables = [table_of(rng, "float32", rows, 40) for rows in (50, 30, 2)]
    layer = BertEmbeddings(*tables, layer_norm=(np.ones(40), None, 1e-12))
    ids = {
        "token_ids": rng.integers(0, 50, tokens),
        "position_ids": rng.integers(0, 30, tokens),
        "segment_ids": rng.integers(0, 2, tokens),
    }
    out = np.full((tokens, 40), 42, np.float32)
    stage = layer if normed else layer.sum
    # segments first: each fault that is added is to be reported before those that were there
    for name, bad, place in [
        ("segment_ids", 2, 0),
        ("position_ids", -1, tokens // 2),
        ("token_ids", 50, tokens - 1),
    ]:
        ids[name][place:] = bad
        with pytest.raises(IndexError, match=rf"^{name}\[{place}\] is {bad}, .*of range"):
            stage(**ids, out=out, num_threads=threads)
        assert (out == 42).all()
