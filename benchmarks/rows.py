"""What is compared with what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.timing import Spread, ratio, spread
from benchmarks.workload import Point

__all__ = [
    "FUNCTION",
    "LAYER",
    "LAYERNORM",
    "ONE_TOKEN",
    "RACES",
    "ROWS",
    "SEED",
    "WIDENED",
    "Comparison",
    "Figure",
    "Measurement",
    "Row",
]


@dataclass(frozen=True)
class Measurement:
    """A group of sides at one point.

    `seconds` per call in each round; `errors` are relative to a row's largest element; `absent`
    says of sides that were not timed why.
    """

    group: str
    point: Point
    ids: str
    seconds: Mapping[str, tuple[float, ...]]
    page_faults: Mapping[str, float]
    errors: Mapping[str, float]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One number that is no row of the grid; `value` None: not measured, and `note` says why."""

    name: str
    value: float | None
    unit: str
    note: str
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One of our sides beside another: seconds per call in each round."""

    point: Point
    ids: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    cost: bool = False

    @property
    def ratio(self) -> Spread:
        """How many times longer the other side took; of a cost, how many times longer ours did."""
        if self.cost:
            return ratio(self.ours, self.theirs)
        return ratio(self.theirs, self.ours)


@dataclass(frozen=True)
class Meeting:
    """The group in which two sides meet, and the names of the other side there.

    Of several names the quickest counts, by its median.
    """

    group: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One of our sides, and what it is held against.

    A `cost` is read the other way round: our time as a multiple of the other's, best when low.
    `one_token`: only of calls for one token.
    """

    title: str
    ours: str
    peers: Mapping[str, Meeting]
    cost: bool = False
    one_token: bool = False

    def comparisons(self, peer: str, measurements: Iterable[Measurement]) -> list[Comparison]:
        """What was measured against a peer; empty if one of the two is absent."""
        meeting = self.peers[peer]
        compared = []
        for found in measurements:
            names = [name for name in meeting.names if name in found.seconds]
            if (
                found.group == meeting.group
                and self.ours in found.seconds
                and len(names) == len(meeting.names)
                and not (self.one_token and found.point.tokens != 1)
            ):
                best = min(names, key=lambda name: spread(found.seconds[name]).median)
                compared.append(
                    Comparison(
                        found.point,
                        found.ids,
                        found.seconds[self.ours],
                        found.seconds[best],
                        self.cost,
                    )
                )
        return compared

    def why_absent(self, peer: str, measurements: Iterable[Measurement]) -> str:
        """The reason why there is no comparison with a peer."""
        meeting = self.peers[peer]
        for found in measurements:
            if found.group == meeting.group:
                for name in (self.ours, *meeting.names):
                    if name in found.absent:
                        return found.absent[name]
        return f"the group {meeting.group} was not run"


def meet(group: str, *names: str) -> Mapping[str, Meeting]:
    """Peers that go by their own names."""
    return {name: Meeting(group, (name,)) for name in names}


FLOAT64 = {
    **meet("float64", "NumPy"),
    **meet("float64-fresh", "NumPy, fresh"),
    **meet("float64", "NumPy, kept"),
}
FLOAT32 = {
    **meet("float32", "NumPy"),
    **meet("float32-fresh", "NumPy, fresh"),
    **meet("float32", "NumPy, kept", "PyTorch", "ONNX Runtime"),
}
ONE_THREAD, TWO_THREADS = "1 thread", "2 threads"
FLOOR_PEER = {"C floor": Meeting("floor", ("floor",))}

LAYER = Row("float32 sum: prepared layer, out=", "layer", FLOAT32)
SEED = Row(
    "float64 sum: the seed's own call, float64 tables, new result",
    "function",
    {**FLOAT64, **meet("float64", "PyTorch", "ONNX Runtime")},
)
WIDENED = Row(
    "float64 sum of float32 tables, new result (NumPy: tables cast beforehand)",
    "function, float32 tables",
    FLOAT64,
)
FUNCTION = Row("float32 sum: the function, out=", "function", FLOAT32)
LAYERNORM = Row(
    "float32 sum + LayerNorm: prepared layer, out=",
    "layer",
    meet("layernorm", "PyTorch", "ONNX Runtime"),
)
FLOOR = Row("float32 sum, timed inside compiled code", "layer", FLOOR_PEER, cost=True)
NORM_COST = Row(
    "float32 sum + LayerNorm, tables at 64 bytes", "layer", meet("layernorm", "sum alone"), True
)
MAPPED_NORM_COST = Row(
    "float32 sum + LayerNorm, mapped tables", "layer", meet("layernorm-mapped", "sum alone"), True
)
NEW_RESULT = tuple(
    Row(
        f"float32 sum, new result, {threads}",
        f"{threads}, new result",
        {"out given": Meeting("threads", (threads,))},
        cost=True,
    )
    for threads in (ONE_THREAD, TWO_THREADS)
)
TWO = Row(
    "float32 sum, two threads", TWO_THREADS, {"one thread": Meeting("threads", (ONE_THREAD,))}
)
AUTOMATIC = Row(
    "float32 sum, number of threads chosen",
    "automatic",
    {"the better of one and two threads": Meeting("threads", (ONE_THREAD, TWO_THREADS))},
    cost=True,
)
TABLE_TYPES = tuple(
    Row(
        f"float32 sum of {kind} tables",
        f"{kind} tables",
        meet("table-types", "float32 tables"),
        cost=True,
    )
    for kind in ("float16", "bfloat16", "int8")
)
ONE_LAYER, ONE_FUNCTION, ONE_SEED, ONE_NORM = (
    Row(f"one token: {title}", ours, {peer: Meeting(group, ("NumPy",))}, cost=True, one_token=True)
    for title, ours, peer, group in (
        ("layer.sum, out=", "layer", "NumPy's sum", "float32"),
        ("the function, float32, out=", "function", "NumPy's sum", "float32"),
        ("the seed's own call, float64", "function", "NumPy's sum", "float64"),
        ("layer with LayerNorm, out=", "layer", "NumPy's sum alone", "layernorm"),
    )
)
ONE_TOKEN = (ONE_LAYER, ONE_FUNCTION, ONE_SEED, ONE_NORM)
RACES = (LAYER, SEED, WIDENED, FUNCTION, LAYERNORM)  # against other software
ROWS = (
    *RACES,
    FLOOR,
    NORM_COST,
    MAPPED_NORM_COST,
    *NEW_RESULT,
    TWO,
    AUTOMATIC,
    *TABLE_TYPES,
    *ONE_TOKEN,
)
