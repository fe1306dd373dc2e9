"""Groups: sides that take turns in one process, and where."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import bertinput
from benchmarks.anatomy import anatomy_sides
from benchmarks.checkpoint import write_checkpoint
from benchmarks.machine import available_memory, cpus_allowed, installed
from benchmarks.sides import (
    OURS_TOLERANCE,
    PEER_TOLERANCE,
    Absent,
    Side,
    Sides,
    floor_sides,
    normalised,
    numpy_sides,
    onnx_side,
    our_names,
    out_array,
    token_position_segment,
    token_segment_position,
    torch_norm_side,
    torch_sum_side,
)
from benchmarks.workload import (
    GRID,
    GROWTH,
    IDS,
    LARGE_BATCHES,
    QUICK_GRID,
    QUICK_GROWTH,
    Ids,
    Norm,
    Point,
    Tables,
    aligned,
    draw_far_tables,
    draw_norm,
    draw_tables,
    growth_shape,
)

__all__ = ["GROUPS", "Group", "growth_name"]

FAR_TOLERANCE = 0.1  # how far peers may be off where LayerNorm is hardest; theirs is reported

SUM = "layer.sum(token_ids, segment_ids, dtype=float32, out=out, num_threads=1)"
NORM = "layer(token_ids, segment_ids, dtype=float32, out=out, num_threads=1)"


def float32_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The float32 sum, into a kept array."""
    tables = draw_tables(point.width, np.float32, quick)
    return [
        *float32_ours(point, ids, quick, fresh=False),
        torch_sum_side(tables, ids),
        onnx_side(point, tables, ids),
    ]


def float32_fresh_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The same beside a NumPy whose process has freed nothing large yet."""
    return float32_ours(point, ids, quick, fresh=True)


def float32_ours(point: Point, ids: Ids, quick: bool, fresh: bool) -> Sides:
    """The layer and the function beside NumPy."""
    tables = draw_tables(point.width, np.float32, quick)
    names = our_names(tables, ids)
    layer = bertinput.BertEmbeddings(*tables)
    return [
        Side(
            "layer",
            SUM,
            {**names, "layer": layer, "out": out_array(point, np.float32)},
            lambda: token_segment_position(tables, ids),
        ),
        Side(
            "function",
            "bert_embeddings(token_ids, segment_ids, T, P, G, dtype=float32, out=out, "
            "num_threads=1)",
            {**names, "out": out_array(point, np.float32)},
            lambda: token_position_segment(tables, ids, np.float32),
        ),
        *numpy_sides(point, tables, ids, fresh),
    ]


def float64_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The float64 sum by the seed's own call, of float64 and of float32 tables; new results."""
    tables = draw_tables(point.width, np.float64, quick)
    return [
        *float64_ours(point, ids, quick, fresh=False),
        torch_sum_side(tables, ids),
        onnx_side(point, tables, ids),
    ]


def float64_fresh_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The same beside a NumPy whose process has freed nothing large yet."""
    return float64_ours(point, ids, quick, fresh=True)


def float64_ours(point: Point, ids: Ids, quick: bool, fresh: bool) -> Sides:
    """The function with float64 and with float32 tables beside NumPy."""
    tables = draw_tables(point.width, np.float64, quick)
    narrow = draw_tables(point.width, np.float32, quick)
    statement = "bert_embeddings(token_ids, segment_ids, T, P, G, num_threads=1)"
    return [
        Side(
            "function",
            statement,
            our_names(tables, ids),
            lambda: token_position_segment(tables, ids, np.float64),
        ),
        Side(
            "function, float32 tables",
            statement,
            our_names(narrow, ids),
            lambda: token_position_segment(narrow, ids, np.float64),
        ),
        *numpy_sides(point, tables, ids, fresh),
    ]


def norm_ours(
    point: Point, ids: Ids, layer: bertinput.BertEmbeddings, tables: Tables, norm: Norm
) -> Sides:
    """A layer with its LayerNorm, and its sum alone."""
    names = {"layer": layer, "float32": np.float32, "token_ids": ids.token}
    names |= {"segment_ids": ids.segment}
    return [
        Side(
            "layer",
            NORM,
            {**names, "out": out_array(point, np.float32)},
            lambda: normalised(token_segment_position(tables, ids), norm),
            OURS_TOLERANCE,
        ),
        Side(
            "sum alone",
            SUM,
            {**names, "out": out_array(point, np.float32)},
            lambda: token_segment_position(tables, ids),
        ),
    ]


def norm_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The float32 sum and its LayerNorm; of NumPy, which has none, the sum."""
    tables, norm = draw_tables(point.width, np.float32, quick), draw_norm(point.width)
    layer = bertinput.BertEmbeddings(*tables, layer_norm=norm)
    numpy_sum, *_ = numpy_sides(point, tables, ids, fresh=False)
    return [
        *norm_ours(point, ids, layer, tables, norm),
        numpy_sum,
        torch_norm_side(tables, ids, norm, PEER_TOLERANCE),
        onnx_side(point, tables, ids, norm, PEER_TOLERANCE),
    ]


def far_norm_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """LayerNorm of rows of mean 10 and deviation 0.01."""
    tables, norm = draw_far_tables(point.width, quick), draw_norm(point.width)
    layer = bertinput.BertEmbeddings(*tables, layer_norm=norm)
    return [
        *norm_ours(point, ids, layer, tables, norm),
        torch_norm_side(tables, ids, norm, FAR_TOLERANCE),
        onnx_side(point, tables, ids, norm, FAR_TOLERANCE),
    ]


@cache
def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with this process."""
    return tempfile.TemporaryDirectory(prefix="bertinput-", ignore_cleanup_errors=True)


@cache
def mapped_layer(width: int, quick: bool) -> bertinput.BertEmbeddings:
    """A layer whose tables are pages of a safetensors file."""
    folder = Path(temporary_folder().name, f"width-{width}")
    folder.mkdir()
    write_checkpoint(folder, draw_tables(width, np.float32, quick), draw_norm(width))
    return bertinput.BertEmbeddings.from_pretrained(folder, family="bert")


def mapped_norm_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """LayerNorm and the sum alone, both of tables that are mapped from a file."""
    tables, norm = draw_tables(point.width, np.float32, quick), draw_norm(point.width)
    return norm_ours(point, ids, mapped_layer(point.width, quick), tables, norm)


def floor_group(point: Point, ids: Ids, quick: bool) -> Sides:
    """The compiled part of the float32 sum beside memcpy."""
    return floor_sides(point, draw_tables(point.width, np.float32, quick), ids)


def thread_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The float32 sum on one and two threads and on as many as it chooses; new results, too."""
    tables = draw_tables(point.width, np.float32, quick)
    names = our_names(tables, ids) | {"layer": bertinput.BertEmbeddings(*tables)}
    lacking = None
    if cpus_allowed() < 2:
        lacking = "this process may use only one CPU"
    elif not bertinput.build_info()["openmp"]:
        lacking = "this build has no OpenMP"
    sides: Sides = []
    for name, more, kept in (
        ("1 thread", ", num_threads=1", True),
        ("2 threads", ", num_threads=2", True),
        ("automatic", "", True),
        ("1 thread, new result", ", num_threads=1", False),
        ("2 threads, new result", ", num_threads=2", False),
    ):
        if lacking and not name.startswith("1 "):
            sides.append(Absent(name, lacking))
            continue
        sides.append(
            Side(
                name,
                f"layer.sum(token_ids, segment_ids, dtype=float32{', out=out' * kept}{more})",
                names | ({"out": out_array(point, np.float32)} if kept else {}),
                lambda: token_segment_position(tables, ids),
            )
        )
    return sides


@cache
def cast_tables(width: int, dtype: Any, quick: bool) -> tuple[Tables, Tables]:
    """The tables in a narrower type, and what they hold in float32."""
    drawn = draw_tables(width, np.float32, quick)
    narrow = Tables(*(aligned(table.shape, dtype) for table in drawn))
    for table, source in zip(narrow, drawn, strict=True):
        table[:] = source
    return narrow, Tables(*(table.astype(np.float32) for table in narrow))


@cache
def quantized_tables(width: int, quick: bool) -> tuple[tuple[Any, ...], Tables]:
    """The tables as int8 with a scale for each row, and what they hold in float32."""
    quantized, decoded = [], []
    for source in draw_tables(width, np.float32, quick):
        scale = np.abs(source).max(axis=1) / np.float32(127)
        values = aligned(source.shape, np.int8)
        values[:] = np.rint(source / scale[:, None])
        quantized.append(bertinput.QuantizedTable(values, scale))
        decoded.append(values.astype(np.float32) * scale[:, None])
    return tuple(quantized), Tables(*decoded)


def table_type_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The float32 sum of tables of each type."""
    sides: Sides = []

    def add(name: str, tables: Any, decoded: Tables) -> None:
        sides.append(
            Side(
                name,
                SUM,
                {
                    "layer": bertinput.BertEmbeddings(*tables),
                    "float32": np.float32,
                    "token_ids": ids.token,
                    "segment_ids": ids.segment,
                    "out": out_array(point, np.float32),
                },
                lambda: token_segment_position(decoded, ids),
            )
        )

    drawn = draw_tables(point.width, np.float32, quick)
    add("float32 tables", drawn, drawn)
    add("float16 tables", *cast_tables(point.width, np.float16, quick))
    ml_dtypes = installed("ml_dtypes")
    if ml_dtypes is None:
        sides.append(Absent("bfloat16 tables", "ml_dtypes is not installed"))
    else:
        add("bfloat16 tables", *cast_tables(point.width, ml_dtypes.bfloat16, quick))
    add("int8 tables", *quantized_tables(point.width, quick))
    return sides


def growth_name(tokens: int) -> str:
    """The name of a side of the growth group."""
    return f"{tokens} tokens"


def growth_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """The float32 sum for 1, 4, 16, ... tokens, all into one array."""
    tables = draw_tables(point.width, np.float32, quick)
    layer = bertinput.BertEmbeddings(*tables)
    available = available_memory()
    sides: Sides = []
    fitting = []
    for tokens in QUICK_GROWTH if quick else GROWTH:
        needed = tokens * point.width * 4
        if available is None or needed < available / 2:
            fitting.append(tokens)
        else:
            sides.append(
                Absent(
                    growth_name(tokens),
                    f"its result takes {needed / 1e9:.1f} GB, more than half of the "
                    f"{available / 1e9:.1f} GB of memory that are free",
                )
            )
    kept = np.empty(max(fitting) * point.width, np.float32)
    for tokens in fitting:
        shape = growth_shape(tokens)
        part = Ids(*(each.reshape(-1)[:tokens].reshape(shape) for each in ids))
        last = Ids(*(each[-1:] for each in part))
        sides.append(
            Side(
                growth_name(tokens),
                SUM,
                {
                    "layer": layer,
                    "float32": np.float32,
                    "token_ids": part.token,
                    "segment_ids": part.segment,
                    "out": kept[: tokens * point.width].reshape(*shape, point.width),
                },
                partial(token_segment_position, tables, last),
                last=1,  # of 1.6 GB the rest would cost more than it tells
            )
        )
    return sides


@dataclass(frozen=True)
class Group:
    """Sides that take turns in one process, at which points, with which ids.

    `fresh`: nothing large is freed in that process before.
    """

    sides: Callable[[Point, Ids, bool], Sides]
    points: tuple[Point, ...] = GRID
    quick_points: tuple[Point, ...] = QUICK_GRID
    ids: tuple[str, ...] = IDS
    fresh: bool = False


def one_point(largest: int) -> Point:
    """The point whose ids serve all sizes of the growth group."""
    return Point(*growth_shape(largest), 384)


GROUPS = {
    "float32": Group(float32_sides),
    "float32-fresh": Group(float32_fresh_sides, fresh=True),
    "float64": Group(float64_sides),
    "float64-fresh": Group(float64_fresh_sides, fresh=True),
    "layernorm": Group(norm_sides),
    "layernorm-mapped": Group(mapped_norm_sides),
    "layernorm-far": Group(far_norm_sides, points=(Point(8, 128, 384), Point(8, 128, 768))),
    "floor": Group(floor_group),
    "threads": Group(thread_sides, points=GRID + LARGE_BATCHES),
    "table-types": Group(table_type_sides),
    "growth": Group(
        growth_sides, (one_point(GROWTH[-1]),), (one_point(QUICK_GROWTH[-1]),), fresh=True
    ),
    "anatomy": Group(anatomy_sides, (Point(1, 1, 768),), (Point(1, 1, 48),), ids=IDS[:1]),
}
