"""Alternating rounds of calibrated samples."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from timeit import Timer
from typing import NamedTuple

from benchmarks.sides import Side

if sys.platform != "win32":
    import resource

__all__ = ["Spread", "Timing", "alternate", "ratio", "spread"]


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


class Timing(NamedTuple):
    """Of every side: seconds per call in each round, and page faults per call."""

    seconds: dict[str, tuple[float, ...]]
    page_faults: dict[str, float]


LEAST_REPEATS = 4  # a difference of two times needs more than one call between them


class Sampler:
    """Times one side: its statement again and again, or, if it repeats itself, from within."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.timer = Timer(side.statement, globals=side.names)

    def total(self, calls: int) -> float:
        """Seconds that so many calls take.

        Of a side that repeats itself: those of 1 + `calls` calls less those of one, which leaves
        the way into compiled code and out of it aside.
        """
        if not self.side.repeats:
            return self.timer.timeit(calls)
        one = self.within(1)
        return self.within(1 + calls) - one

    def within(self, calls: int) -> float:
        """Seconds that the statement takes with so many calls inside."""
        self.side.names["calls"] = calls
        return self.timer.timeit(1)

    def calls_per_sample(self, least_seconds: float) -> int:
        """So many calls that even the fastest sample takes `least_seconds`."""
        calls = LEAST_REPEATS if self.side.repeats else 1
        while True:
            fastest = min(self.total(calls) for _ in range(3))
            if fastest >= least_seconds:
                return calls
            # a little more than needed, since the next sample may be faster
            wanted = int(1.2 * calls * least_seconds / max(fastest, 1e-9))
            calls = max(calls + 1, min(calls * 10, wanted))


def page_faults() -> int:
    """How many pages this process has been given so far; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def alternate(sides: Sequence[Side], rounds: int, least_seconds: float) -> Timing:
    """Time all sides in turn, round by round.

    The order within a round is shuffled, so that no side always follows the same other one, and
    every sample is preceded by an untimed call, so that none pays for what the side before it
    left in the caches and in malloc.
    """
    samplers = {side.name: Sampler(side) for side in sides}
    calls = {name: sampler.calls_per_sample(least_seconds) for name, sampler in samplers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    faults = dict.fromkeys(samplers, 0.0)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(samplers)
        shuffle(order)
        for name in order:
            samplers[name].timer.timeit(1)
            before = page_faults()
            seconds[name].append(samplers[name].total(calls[name]) / calls[name])
            faults[name] += (page_faults() - before) / calls[name] / rounds
    return Timing({name: tuple(values) for name, values in seconds.items()}, faults)


def spread(values: Sequence[float]) -> Spread:
    """Median and interquartile range."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """How many times longer one side took, round by round: drift of the machine cancels out."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])
