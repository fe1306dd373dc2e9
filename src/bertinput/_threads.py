"""How many CPUs a call may use when its caller names no number of threads.

OMP_NUM_THREADS if it is set, else what the affinity mask and the cgroup's CPU quota leave; never
more than the OpenMP runtime's own limit, which knows nothing of quotas.
"""

from __future__ import annotations

import functools
import math
import os

__all__ = ["affinity", "available"]


def affinity() -> int:
    """CPUs that this process may run on, as of now."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available() -> int:
    """CPUs for a call that names no number; the core caps it by ``omp_get_max_threads``."""
    # a list gives the number for each level of nesting; the runtime ignores what is no number
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return affinity()
    return min(affinity(), max(1, math.ceil(min(_quota(), 1 << 30))))


@functools.cache
def _quota(root: str = "/") -> float:
    """CPUs that the tightest cgroup quota on this process is worth; infinity without one.

    Version 2 keeps ``cpu.max`` ("quota period" or "max period") in every folder of the
    hierarchy, version 1 two files. Read once: quotas rarely change under a running process.
    """
    tightest = math.inf
    for hierarchy, path in _cgroups(root):
        parts = path.strip("/").split("/")
        for depth in range(len(parts), -1, -1):
            tightest = min(tightest, _cpu_max(os.path.join(hierarchy, *parts[:depth])))
    return tightest


def _cgroups(root: str) -> list[tuple[str, str]]:
    """Hierarchies that may hold a CPU quota, each with this process's path below it."""
    mount = os.path.join(root, "sys/fs/cgroup")
    found = []
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((mount, path))
        elif "cpu" in controllers.split(","):
            found.append((os.path.join(mount, "cpu"), path))
            found.append((os.path.join(mount, controllers), path))
    return found


def _cpu_max(folder: str) -> float:
    told = _text(os.path.join(folder, "cpu.max")).split() or [
        _text(os.path.join(folder, f"cpu.cfs_{what}_us")).strip() for what in ("quota", "period")
    ]
    try:
        quota, period = told
        cpus = int(quota) / int(period)  # "max" and -1 stand for no quota
    except (ValueError, ZeroDivisionError):
        return math.inf
    return cpus if cpus > 0 else math.inf


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
