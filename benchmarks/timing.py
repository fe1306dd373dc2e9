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


def calls_per_sample(timer: Timer, least_seconds: float) -> int:
    """So many calls that even the fastest sample takes `least_seconds`."""
    calls = 1
    while True:
        fastest = min(timer.repeat(3, calls))
        if fastest >= least_seconds:
            return calls
        # a little more than needed, since the next sample may be faster
        calls = max(calls + 1, min(calls * 10, int(1.2 * calls * least_seconds / fastest)))


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
    timers = {side.name: Timer(side.statement, globals=side.names) for side in sides}
    calls = {name: calls_per_sample(timer, least_seconds) for name, timer in timers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    faults = dict.fromkeys(timers, 0.0)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(timers)
        shuffle(order)
        for name in order:
            timers[name].timeit(1)
            before = page_faults()
            seconds[name].append(timers[name].timeit(calls[name]) / calls[name])
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
