"""How fast and how light it has to be, and whether it is.

A target of a row is held at every point that it covers, with each draw of ids, never on average
unless it is a geometric mean. The per-point targets against NumPy are held against both: with a
warm allocator ("NumPy") and in a fresh process ("NumPy, fresh"). The geometric mean of the float64
call is held against the fresh one, all other means against both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.groups import growth_name
from benchmarks.machine import Caches
from benchmarks.rows import (
    AUTOMATIC,
    FLOOR,
    LAYER,
    LAYERNORM,
    MAPPED_NORM_COST,
    NEW_RESULT,
    NORM_COST,
    ONE_FUNCTION,
    ONE_LAYER,
    SEED,
    TABLE_TYPES,
    TWO,
    WIDENED,
    Figure,
    Measurement,
    Row,
)
from benchmarks.timing import ratio, spread
from benchmarks.workload import GRID, GROWTH, Point

__all__ = [
    "FIGURE_LIMITS",
    "GROWTH_LIMIT",
    "Target",
    "Verdict",
    "amount",
    "floor_limit",
    "growth_points",
    "targets",
    "verdicts",
]

MIB = 1 << 20
Limit = Callable[[Point], float]


@dataclass(frozen=True)
class Verdict:
    """One figure beside what it has to be; `figure` None: not measured, for the `reason`."""

    what: str
    where: str
    figure: float | None
    limit: float
    at_least: bool
    unit: str = "x"
    reason: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is a figure."""
        return self.figure is not None

    @property
    def missed(self) -> bool:
        """Whether there is a figure, and it falls short; a figure that is no number does."""
        if self.figure is None:
            return False
        return not (self.figure >= self.limit if self.at_least else self.figure <= self.limit)

    @property
    def distance(self) -> float:
        """By what factor the figure falls short of the limit; below 1 it does not."""
        if self.figure is None:
            return 0.0
        if math.isnan(self.figure):
            return math.inf
        if self.at_least:
            return self.limit / self.figure if self.figure > 0 else math.inf
        if self.limit == 0:
            return math.inf if self.figure > 0 else 0.0
        return self.figure / self.limit

    @property
    def wanted(self) -> str:
        """The limit in words."""
        return f"{'>=' if self.at_least else '<='} {amount(self.limit, self.unit)}"

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        if self.figure is None:
            return f"{self.what}{place}: {self.wanted}: {self.reason}"
        return f"{self.what}{place}: {amount(self.figure, self.unit)} instead of {self.wanted}"


def amount(value: float, unit: str) -> str:
    """A figure with its unit, as close as it needs to be told."""
    return f"{value:.3g} times" if unit == "x" else f"{value:.3g} {unit}"


@dataclass(frozen=True)
class Target:
    """What a row must reach against a peer at the points with so many tokens.

    At least the limit, or of a row that is a cost, at most. `mean`: the geometric mean over all
    points and ids, instead of each.
    """

    row: Row
    peer: str
    limit: float | Limit
    tokens_from: int = 1
    tokens_below: float = math.inf
    mean: bool = False

    def verdicts(self, measurements: Sequence[Measurement]) -> list[Verdict]:
        """One for each point and ids, or one for the mean."""
        what = f"{self.row.title}, against {self.peer}"
        found = [
            each
            for each in self.row.comparisons(self.peer, measurements)
            if self.tokens_from <= each.point.tokens < self.tokens_below
        ]
        blank = Verdict(what, "", None, self.limit_at(GRID[-1]), not self.row.cost)
        if not found:
            reason = "no such point was run"
            if not self.row.comparisons(self.peer, measurements):
                reason = self.row.why_absent(self.peer, measurements)
            return [replace(blank, where=self.covered, reason=reason)]
        if self.mean:
            mean = statistics.geometric_mean(each.ratio.median for each in found)
            return [replace(blank, where=self.covered, figure=mean)]
        return [
            replace(
                blank,
                where=f"{each.point} {each.ids}",
                figure=each.ratio.median,
                limit=self.limit_at(each.point),
            )
            for each in found
        ]

    @property
    def covered(self) -> str:
        """The points it covers, in words."""
        first = "geometric mean" if self.mean else "every point"
        if self.tokens_from > 1:
            first += f" from {self.tokens_from:,} tokens on"
        if self.tokens_below < math.inf:
            first += f" below {self.tokens_below:,.0f} tokens"
        return first

    def limit_at(self, point: Point) -> float:
        """The limit at a point."""
        return self.limit(point) if callable(self.limit) else self.limit


def floor_limit(caches: Caches) -> Limit:
    """How many times the floor's time the sum may take.

    The floor moves two streams, token rows and result; the sum moves the position rows, too.
    Where only that third stream does not fit into the second-level cache any more, the two do
    not compare.
    """

    def limit(point: Point) -> float:
        positions = 4 * point.length * point.width
        two = 2 * point.bytes
        if point.bytes > 16 * MIB:
            return 1.0
        if point.bytes > MIB:
            return 1.3
        second = caches.second
        return 2.0 if second is not None and two <= second < two + positions else 1.6

    return limit


def targets(caches: Caches) -> tuple[Target, ...]:
    """All targets of rows."""
    numpys = ("NumPy", "NumPy, fresh")
    return (
        Target(FLOOR, "C floor", floor_limit(caches), tokens_from=64),
        *(Target(LAYER, peer, 3.0) for peer in (*numpys, "PyTorch", "ONNX Runtime")),
        *(Target(LAYER, peer, 4.0, mean=True) for peer in (*numpys, "ONNX Runtime")),
        Target(LAYER, "PyTorch", 5.0, mean=True),
        *(Target(SEED, peer, 3.0, tokens_from=64) for peer in numpys),
        Target(SEED, "NumPy, fresh", 8.0, mean=True),
        *(Target(WIDENED, peer, 4.0, tokens_from=64) for peer in numpys),
        Target(NORM_COST, "sum alone", 1.8, tokens_from=8),
        Target(MAPPED_NORM_COST, "sum alone", 2.2, tokens_from=8),
        Target(LAYERNORM, "PyTorch", 3.5, tokens_from=8),
        Target(LAYERNORM, "ONNX Runtime", 5.5, tokens_from=8),
        Target(ONE_LAYER, "NumPy's sum", 0.29),
        Target(ONE_FUNCTION, "NumPy's sum", 0.57),
        *(Target(row, "out given", 1.15, tokens_from=64) for row in NEW_RESULT),
        Target(TWO, "one thread", 1.7, tokens_from=8192),
        Target(AUTOMATIC, "the better of one and two threads", 1.1),
        *(
            target
            for row in TABLE_TYPES
            for target in (
                Target(row, "float32 tables", 1.0, tokens_from=4096),
                Target(row, "float32 tables", 1.3, tokens_below=4096),
            )
        ),
    )


# ---- growth ----

GROWTH_LIMIT = 1.3
GROWTH_FROM = 1024  # tokens
USUAL_CACHE = 32 * MIB  # where the system does not tell the last-level cache


def growth_points(found: Measurement, caches: Caches) -> list[int]:
    """Sizes in tokens, from 1,024 on, whose results do not fit into the last-level cache."""
    last = caches.last or USUAL_CACHE
    return [
        tokens
        for tokens in GROWTH
        if growth_name(tokens) in found.seconds
        and tokens >= GROWTH_FROM
        and 4 * tokens * found.point.width > last
    ]


def growth_verdicts(measurements: Iterable[Measurement], caches: Caches) -> list[Verdict]:
    """The cost per token at each size out of cache, beside the cheapest of them."""
    what = "cost of a token as work grows, against the cheapest size out of cache"
    blank = Verdict(what, "", None, GROWTH_LIMIT, at_least=False)
    verdicts = []
    for found in measurements:
        if found.group != "growth":
            continue
        verdicts += [
            replace(blank, where=f"{name} {found.ids}", reason=reason)
            for name, reason in found.absent.items()
        ]
        costs = {
            tokens: [seconds / tokens for seconds in found.seconds[growth_name(tokens)]]
            for tokens in growth_points(found, caches)
        }
        if len(costs) < 2:
            reason = "fewer than two sizes are out of cache"
            verdicts.append(replace(blank, where=found.ids, reason=reason))
            continue
        cheapest = min(costs.values(), key=lambda each: spread(each).median)
        verdicts += [
            replace(
                blank,
                where=f"{tokens:,} tokens {found.ids}",
                figure=ratio(each, cheapest).median,
            )
            for tokens, each in costs.items()
        ]
    return verdicts or [replace(blank, reason="the group growth was not run")]


# ---- accuracy: no figure is bought with it ----


def accuracy_verdicts(measurements: Iterable[Measurement]) -> list[Verdict]:
    """LayerNorm's largest error at any point beside PyTorch's at any point."""
    measurements = list(measurements)
    verdicts = []
    for group, where in (
        ("layernorm", "every point"),
        ("layernorm-far", "rows of mean 10 and deviation 0.01"),
    ):
        blank = Verdict("LayerNorm's largest error, against PyTorch's", where, None, 1.0, False)
        errors = [found.errors for found in measurements if found.group == group]
        ours, theirs = (
            [each[name] for each in errors if name in each] for name in ("layer", "PyTorch")
        )
        if ours and theirs:
            verdicts.append(replace(blank, figure=max(ours) / max(theirs)))
        else:
            reason = "torch is not installed" if errors else f"the group {group} was not run"
            verdicts.append(replace(blank, reason=reason))
    return verdicts


# ---- whole processes ----

FIGURE_LIMITS = {
    "CPU burnt by a thread team that is called every 5 ms": (0.05, "of a core"),
    "import, beyond NumPy's": (15.0, "ms"),
    "wheel": (1.0, "MiB"),
    "loading all-MiniLM-L6-v2": (10.0, "ms"),
    "tables that loading copied": (0.0, "tables"),
    "memory that loading takes": (0.25, "of the tables"),
    "peak memory of a call beyond its result": (4.0, "MiB"),
}


def figure_verdicts(figures: Iterable[Figure]) -> list[Verdict]:
    """The single figures."""
    found = {figure.name: figure for figure in figures}
    if strange := found.keys() - FIGURE_LIMITS.keys():
        raise ValueError(f"figures without a limit: {', '.join(sorted(strange))}")
    verdicts = []
    for name, (limit, unit) in FIGURE_LIMITS.items():
        blank = Verdict(name, "", None, limit, at_least=False, unit=unit)
        if name in found:
            verdicts.append(replace(blank, figure=found[name].value, reason=found[name].note))
        else:
            verdicts.append(replace(blank, reason="it was not run"))
    return verdicts


def verdicts(
    measurements: Sequence[Measurement], figures: Sequence[Figure], caches: Caches
) -> list[Verdict]:
    """Every target at every point that it covers."""
    return [
        *(verdict for target in targets(caches) for verdict in target.verdicts(measurements)),
        *growth_verdicts(measurements, caches),
        *accuracy_verdicts(measurements),
        *figure_verdicts(figures),
    ]
