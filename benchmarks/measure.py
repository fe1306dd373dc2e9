"""All groups at all points, each in a process of its own."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from benchmarks.rows import Measurement
from benchmarks.sides import GROUPS, check
from benchmarks.timing import alternate
from benchmarks.workload import GRID, IDS, QUICK_GRID, Point, draw_ids

__all__ = ["measure_all"]

FREED = 31 << 20  # bytes; glibc's malloc does not learn from blocks of more than 32 MiB
LEAST_SECONDS, QUICK_LEAST_SECONDS = 3e-3, 1e-4  # of a sample


def measure(
    group: str, point: Point, rounds: int, quick: bool
) -> tuple[list[Measurement], dict[str, str]]:
    """One group at one point, with both draws of ids, and the statements that were timed."""
    measurements = []
    statements: dict[str, str] = {}
    fresh = GROUPS[group].fresh
    if not fresh:
        np.empty(FREED, np.uint8)
    drawn = {kind: draw_ids(point, kind, quick) for kind in IDS}
    for kind, ids in drawn.items():
        sides = GROUPS[group].sides(point, ids, fresh, quick)
        torch = sys.modules.get("torch")  # there only if one of the sides uses it
        with torch.inference_mode() if torch else contextlib.nullcontext():
            errors = {side.name: check(side) for side in sides}
            timing = alternate(sides, rounds, QUICK_LEAST_SECONDS if quick else LEAST_SECONDS)
        measurements.append(Measurement(group, point, kind, *timing, errors))
        statements = {side.name: side.statement for side in sides}
    return measurements, statements


def measure_all(rounds: int, quick: bool) -> tuple[list[Measurement], dict[str, dict[str, str]]]:
    """Everything that was measured, and by group the statements that were timed.

    New processes, because glibc's malloc keeps more memory once a larger block has been freed:
    what a side pays that allocates would depend on what happened to run before it.
    """
    measurements: list[Measurement] = []
    expressions: dict[str, dict[str, str]] = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for point in QUICK_GRID if quick else GRID:
            for group in GROUPS:
                print(f"{point} {group}", file=sys.stderr)
                task = processes.submit(measure, group, point, rounds, quick)
                found, expressions[group] = task.result()
                measurements += found
    return measurements, expressions
