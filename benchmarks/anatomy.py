"""Where the time of a call for one token goes: ``python -m benchmarks.anatomy``.

No part of a call can be timed by itself. So calls are timed that differ in one thing, in turns,
and each step of the table is the difference between two of them. The first call is of an empty
method with the same parameters: what Python takes before anything of this package runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import bertinput
from benchmarks.sides import (
    OURS_TOLERANCE,
    Side,
    Sides,
    normalised,
    token_position_segment,
    token_segment_position,
)
from benchmarks.timing import spread
from benchmarks.workload import Ids, Norm, Point, Tables, aligned, draw_norm, draw_tables

__all__ = ["STEPS", "Step", "anatomy_markdown", "anatomy_sides"]


class Empty:
    """A layer that does nothing."""

    def sum(
        self,
        token_ids: Any,
        segment_ids: Any = None,
        *,
        position_ids: Any = None,
        attention_mask: Any = None,
        dtype: Any = np.float32,
        out: Any = None,
        num_threads: Any = None,
    ) -> Any:
        """Take the arguments of `BertEmbeddings.sum`."""


@dataclass(frozen=True)
class Step:
    """A call, and what it costs beyond another one that lacks this step alone.

    `beyond` None: beyond nothing, the whole call.
    """

    what: str
    call: str
    beyond: str | None = None


FULL = "one token"
STEPS = (
    Step("an empty Python method, same arguments", "empty"),
    Step("arguments checked: no token, width 1", "no token", "empty"),
    Step("one token: ids read and checked, rows found, width 1", "width 1", "no token"),
    Step("the full width", FULL, "width 1"),
    Step("in all: `layer.sum`, ids and out given", FULL),
    Step("of that, the check of ids and the rows, timed inside compiled code", "compiled"),
    Step("segment ids given, rather than none", FULL, "no segment ids"),
    Step("position ids given, too", "position ids", FULL),
    Step("int32 ids instead of int64", "int32 ids", FULL),
    Step("ids in nested lists", "lists", FULL),
    Step("a mapping as tokenizers return it", "mapping", FULL),
    Step("a new result instead of out", "new result", FULL),
    Step("the number of threads chosen instead of given", "automatic threads", FULL),
    Step("LayerNorm", "LayerNorm", FULL),
    Step("the function, which looks at its tables in each call, float32", "function", FULL),
    Step("in all: the seed's own call, float64, new result", "seed"),
    Step("in all: NumPy, `T[t] + P[:1] + G[g]`, float32", "NumPy"),
)


def narrow(tables: Tables) -> Tables:
    """The first column of each table, rows as close as they get."""
    columns = [aligned((len(table), 1), table.dtype) for table in tables]
    for column, table in zip(columns, tables, strict=True):
        column[:] = table[:, :1]
    return Tables(*columns)


def anatomy_sides(point: Point, ids: Ids, quick: bool) -> Sides:
    """Calls that differ in one thing; the table above says which are subtracted."""
    tables = draw_tables(point.width, np.float32, quick)
    wide = draw_tables(point.width, np.float64, quick)
    one, norm = narrow(tables), draw_norm(point.width)
    one_norm = Norm(norm.weight[:1], norm.bias[:1])
    layer = bertinput.BertEmbeddings(*tables, layer_norm=norm)
    names = {
        "layer": layer,
        "float32": np.float32,
        "token_ids": ids.token,
        "segment_ids": ids.segment,
    }
    position = np.arange(point.length)[None]
    none_given = Ids(ids.token, np.zeros_like(ids.segment))
    shape = (point.batch, point.length)

    def call(
        name: str,
        arguments: str = "token_ids, segment_ids",
        more: Mapping[str, Any] | None = None,
        *,
        tables: Tables = tables,
        ids: Ids = ids,
        options: str = "dtype=float32, out=out, num_threads=1",
    ) -> Side:
        width = tables.token.shape[1]
        out = {"out": np.empty((*ids.token.shape, width), np.float32)} if "out=" in options else {}
        return Side(
            name,
            f"layer.sum({arguments}, {options})",
            names | out | dict(more or {}),
            lambda: token_segment_position(tables, ids),
        )

    nothing = Ids(*(each[:, :0] for each in ids))
    narrow_layer = bertinput.BertEmbeddings(*one, layer_norm=one_norm)
    narrow_names: dict[str, Any] = {"layer": narrow_layer}
    no_names = narrow_names | {"token_ids": nothing.token, "segment_ids": nothing.segment}
    empty = call("empty", more={"layer": Empty()})
    return [
        Side(empty.name, empty.statement, empty.names, None),
        call("no token", more=no_names, tables=one, ids=nothing),
        call("width 1", more=narrow_names, tables=one),
        call(FULL),
        Side(
            "compiled",
            "run(token_ids, segment_ids, None, None, float32, out, 1, False, calls)",
            {
                **names,
                "run": layer._stage.run,
                "out": np.empty(point, np.float32),
                "calls": 1,
            },
            lambda: token_segment_position(tables, ids),
            repeats=True,
        ),
        call("no segment ids", "token_ids", ids=none_given),
        call(
            "position ids",
            "token_ids, segment_ids, position_ids=position_ids",
            {"position_ids": np.broadcast_to(position, shape).copy()},
        ),
        call(
            "int32 ids",
            more={
                "token_ids": ids.token.astype(np.int32),
                "segment_ids": ids.segment.astype(np.int32),
            },
        ),
        call(
            "lists",
            more={"token_ids": ids.token.tolist(), "segment_ids": ids.segment.tolist()},
        ),
        call(
            "mapping",
            "batch",
            {"batch": {"input_ids": ids.token, "token_type_ids": ids.segment}},
        ),
        call("new result", options="dtype=float32, num_threads=1"),
        call("automatic threads", options="dtype=float32, out=out"),
        Side(
            "LayerNorm",
            "layer(token_ids, segment_ids, dtype=float32, out=out, num_threads=1)",
            names | {"out": np.empty(point, np.float32)},
            lambda: normalised(token_segment_position(tables, ids), norm),
            OURS_TOLERANCE,
        ),
        Side(
            "function",
            "bert_embeddings(token_ids, segment_ids, T, P, G, dtype=float32, out=out, "
            "num_threads=1)",
            {
                **names,
                "bert_embeddings": bertinput.bert_embeddings,
                "out": np.empty(point, np.float32),
                **dict(zip("TPG", tables, strict=True)),
            },
            lambda: token_position_segment(tables, ids, np.float32),
        ),
        Side(
            "seed",
            "bert_embeddings(token_ids, segment_ids, T, P, G)",
            {
                **names,
                "bert_embeddings": bertinput.bert_embeddings,
                **dict(zip("TPG", wide, strict=True)),
            },
            lambda: token_position_segment(wide, ids, np.float64),
        ),
        Side(
            "NumPy",
            "T[t] + P[:S] + G[g]",
            {
                "t": ids.token,
                "g": ids.segment,
                "S": point.length,
                **dict(zip("TPG", tables, strict=True)),
            },
            lambda: token_position_segment(tables, ids, np.float32),
        ),
    ]


def anatomy_markdown(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The steps as a Markdown table; the difference of each pair is taken round by round."""
    lines = ["| step | ns | quartiles |", "| --- | ---: | ---: |"]
    for step in STEPS:
        costs = list(seconds[step.call])
        if step.beyond is not None:
            costs = [a - b for a, b in zip(costs, seconds[step.beyond], strict=True)]
        cost = spread([1e9 * value for value in costs])
        sign = "" if step.beyond is None else "+"
        lines.append(
            f"| {step.what} | {cost.median:{sign}.0f} | {cost.low:{sign}.0f} to "
            f"{cost.high:{sign}.0f} |"
        )
    return lines


def main() -> None:
    """Time the steps alone and print them."""
    from benchmarks.measure import measure_all  # which needs this module for its groups

    (found,), _ = measure_all(rounds=25, quick=False, groups=["anatomy"])
    print(f"one token of width {found.point.width}, one thread: medians of 25 rounds\n")
    print("\n".join(anatomy_markdown(found.seconds)))


if __name__ == "__main__":
    main()
