"""How many CPUs a call may use when its caller names no number of threads.

OMP_NUM_THREADS if it is set, else what the affinity mask and the cgroup's CPU quota leave; never
more than the OpenMP runtime's own limit, which knows nothing of quotas.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

__all__ = ["affinity", "available"]


def affinity() -> int:
    """CPUs that this process may run on, as of now."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available() -> int:
    """CPUs for a call that names no number; the core caps it by ``omp_get_max_threads``."""
    if "OMP_NUM_THREADS" in os.environ:
        return affinity()
    return min(affinity(), max(1, math.ceil(min(_quota(), 1 << 30))))


@functools.cache
def _quota(root: str = "/") -> float:
    """CPUs that the tightest cgroup quota on this process is worth; infinity without one.

    Version 2 keeps ``cpu.max`` ("quota period" or "max period") in every folder of the
    hierarchy, version 1 two files. Read once: quotas rarely change under a running process.
    """
    tightest = math.inf
    for hierarchy, path in _cgroups(Path(root)):
        for folder in [hierarchy / path, *(hierarchy / path).parents]:
            if not folder.is_relative_to(hierarchy):
                break
            tightest = min(tightest, _cpu_max(folder))
    return tightest


def _cgroups(root: Path) -> list[tuple[Path, Path]]:
    """Hierarchies that may hold a CPU quota, each with this process's path below it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = Path(path.lstrip("/"))
        if controllers == "":
            found.append((mount, below))
        elif "cpu" in controllers.split(","):
            found.append((mount / "cpu", below))
            found.append((mount / controllers, below))
    return found


def _cpu_max(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    try:
        cpus = int(quota) / int(period)  # "max" and -1 stand for no quota
    except (ValueError, ZeroDivisionError):
        return math.inf
    return cpus if cpus > 0 else math.inf
