"""Where the figures were taken: machine, versions."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import bertinput
from benchmarks.sides import installed

__all__ = ["load_average", "machine", "versions"]

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def cpu_model() -> str:
    """The processor by name, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "load_average_at_start": load_average(),
    }
    with contextlib.suppress(AttributeError):
        facts["cpus_allowed"] = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        facts["caches"] = {
            f"L{(cache / 'level').read_text().strip()} {(cache / 'type').read_text().strip()}": (
                cache / "size"
            )
            .read_text()
            .strip()
            for cache in sorted(CACHES.glob("index*"))
        }
    with contextlib.suppress(OSError):
        facts["transparent_hugepage"] = HUGE_PAGES.read_text().strip()
    return facts


def versions() -> dict[str, Any]:
    """Versions of all sides; None where a peer is not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("torch", "onnx", "onnxruntime"):
        found[name] = getattr(installed(name), "__version__", None)
    return found | {"bertinput": bertinput.build_info()}
