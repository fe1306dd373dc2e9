"""Where the figures were taken: machine, versions, what is installed."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import bertinput

__all__ = [
    "Caches",
    "available_memory",
    "cache_sizes",
    "cpus_allowed",
    "installed",
    "load_average",
    "machine",
    "versions",
]

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY = Path("/proc/meminfo")


class Caches(NamedTuple):
    """Sizes in bytes; None where the system does not tell."""

    second: int | None
    last: int | None


def installed(name: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def cpu_model() -> str:
    """The processor by name, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpus_allowed() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_texts() -> dict[str, str]:
    """The first CPU's caches as Linux words them: ``{"L2 Unified": "512K"}``."""
    with contextlib.suppress(OSError):
        return {
            f"L{(cache / 'level').read_text().strip()} {(cache / 'type').read_text().strip()}": (
                (cache / "size").read_text().strip()
            )
            for cache in sorted(CACHES.glob("index*"))
        }
    return {}


def cache_sizes() -> Caches:
    """The second-level and the last-level cache that the first CPU reaches."""
    sizes = {}
    for name, size in cache_texts().items():
        parts = re.fullmatch(r"(\d+)([KMG]?)", size)
        if parts and "Instruction" not in name:
            sizes[name[:2]] = int(parts[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[parts[2]]
    return Caches(sizes.get("L2"), sizes[max(sizes)] if sizes else None)


def available_memory() -> int | None:
    """Bytes that a process may take without making others suffer."""
    with contextlib.suppress(OSError, StopIteration):
        lines = MEMORY.read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    return None


def load_average() -> float | None:
    """Processes that want a CPU, over the last minute, this one among them."""
    with contextlib.suppress(AttributeError, OSError):
        return round(os.getloadavg()[0], 2)
    return None


def machine() -> dict[str, Any]:
    """Facts that figures depend on; what a system does not tell is left out."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_allowed": cpus_allowed(),
        "caches": cache_texts(),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "load_average_at_start": load_average(),
    }
    with contextlib.suppress(OSError):
        facts["transparent_hugepage"] = HUGE_PAGES.read_text().strip()
    return facts


def versions() -> dict[str, Any]:
    """Versions of all sides; None where a peer is not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("torch", "onnx", "onnxruntime", "ml_dtypes"):
        found[name] = getattr(installed(name), "__version__", None)
    return found | {"bertinput": bertinput.build_info()}
