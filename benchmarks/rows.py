"""What is compared with what, and how fast it has to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.timing import Spread, ratio
from benchmarks.workload import Point

__all__ = ["ROWS", "TARGETS", "Comparison", "Measurement", "Row", "Target", "missed"]


@dataclass(frozen=True)
class Measurement:
    """A group of sides at one point; `errors` are relative to a row's largest element."""

    group: str
    point: Point
    ids: str
    seconds: Mapping[str, Sequence[float]]
    page_faults: Mapping[str, float]
    errors: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """One of our sides beside one peer: seconds per call in each round, ours and theirs."""

    point: Point
    ids: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratio(self) -> Spread:
        """How many times longer the peer took."""
        return ratio(self.theirs, self.ours)


@dataclass(frozen=True)
class Row:
    """One of our sides, and the peers it is held against, with the groups where they meet."""

    title: str
    ours: str
    peers: Mapping[str, str]

    def comparisons(self, peer: str, measurements: Iterable[Measurement]) -> list[Comparison]:
        """What was measured against a peer; empty if the peer is not installed."""
        return [
            Comparison(found.point, found.ids, found.seconds[self.ours], found.seconds[peer])
            for found in measurements
            if found.group == self.peers[peer] and peer in found.seconds
        ]


FLOAT64 = {
    "NumPy": "float64 sum",
    "NumPy, fresh": "float64 sum, fresh",
    "NumPy, kept": "float64 sum",
}
FLOAT32 = {
    "NumPy": "float32 sum",
    "NumPy, fresh": "float32 sum, fresh",
    "NumPy, kept": "float32 sum",
    "PyTorch": "float32 sum",
    "ONNX Runtime": "float32 sum",
}
LAYER = Row("float32 sum: prepared layer, out=", "layer", FLOAT32)
SEED = Row(
    "float64 sum: the seed's own call, float64 tables, new result",
    "function",
    {**FLOAT64, "PyTorch": "float64 sum", "ONNX Runtime": "float64 sum"},
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
    {"PyTorch": "float32 sum + LayerNorm", "ONNX Runtime": "float32 sum + LayerNorm"},
)
ROWS = (LAYER, SEED, WIDENED, FUNCTION, LAYERNORM)


@dataclass(frozen=True)
class Target:
    """The ratio a row must reach against a peer at every point with so many tokens."""

    row: Row
    peer: str
    at_least: float
    tokens_from: int
    tokens_below: float = float("inf")


TARGETS = tuple(
    target
    for row in (LAYER, SEED, FUNCTION)
    for peer in ("NumPy", "NumPy, fresh")
    for target in (
        Target(row, peer, 2.0, tokens_from=64),
        # checking the arguments must not eat up what the kernel gains
        Target(row, peer, 1.0, tokens_from=1, tokens_below=64),
    )
)


def missed(measurements: Sequence[Measurement]) -> list[str]:
    """A line for each target that a point does not reach."""
    return [
        f"{target.row.title}: {found.point} {found.ids}: {found.ratio.median:.2f} times "
        f"{target.peer} instead of {target.at_least:g}"
        for target in TARGETS
        for found in target.row.comparisons(target.peer, measurements)
        if target.tokens_from <= found.point.tokens < target.tokens_below
        and found.ratio.median < target.at_least
    ]
