"""All groups at all their points, each in a process of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from benchmarks.groups import GROUPS
from benchmarks.rows import Measurement
from benchmarks.sides import Absent, check
from benchmarks.timing import alternate
from benchmarks.workload import Point, draw_ids

__all__ = ["measure_all"]

FREED = 31 << 20  # bytes; glibc's malloc does not learn from blocks of more than 32 MiB
LEAST_SECONDS, QUICK_LEAST_SECONDS = 2e-3, 5e-5  # of a sample


def measure(
    group: str, point: Point, rounds: int, quick: bool
) -> tuple[list[Measurement], dict[str, str]]:
    """One group at one point, with each draw of ids, and the statements that were timed."""
    measurements = []
    statements: dict[str, str] = {}
    if not GROUPS[group].fresh:
        np.empty(FREED, np.uint8)
    for kind in GROUPS[group].ids:
        found = GROUPS[group].sides(point, draw_ids(point, kind, quick), quick)
        absent = {side.name: side.reason for side in found if isinstance(side, Absent)}
        sides = [side for side in found if not isinstance(side, Absent)]
        torch = sys.modules.get("torch")  # there only if one of the sides uses it
        with torch.inference_mode() if torch else contextlib.nullcontext():
            errors = {side.name: check(side) for side in sides}
            timing = alternate(sides, rounds, QUICK_LEAST_SECONDS if quick else LEAST_SECONDS)
        measurements.append(Measurement(group, point, kind, *timing, errors, absent))
        statements = {side.name: side.statement for side in sides}
    return measurements, statements


def measure_all(
    rounds: int, quick: bool, groups: Collection[str]
) -> tuple[list[Measurement], dict[str, dict[str, str]]]:
    """All points of these groups, and by group the statements that were timed.

    New processes, because glibc's malloc keeps more memory once a larger block has been freed:
    what a side pays that allocates would depend on what happened to run before it. A smoke test
    does with one.
    """
    measurements: list[Measurement] = []
    expressions: dict[str, dict[str, str]] = {}
    tasks = None if quick else 1
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=tasks) as processes:
        for group in groups:
            for point in GROUPS[group].quick_points if quick else GROUPS[group].points:
                print(f"{group} {point}", file=sys.stderr)
                task = processes.submit(measure, group, point, rounds, quick)
                found, expressions[group] = task.result()
                measurements += found
    return measurements, expressions
