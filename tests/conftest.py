"""Fixtures that several test files share."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

# The tests run on shared machines: how long an example takes says nothing.
settings.register_profile("bertinput", deadline=None)
settings.load_profile("bertinput")

# Set where everything that a test may need is installed: then a skip hides a fault.
NO_SKIPS = os.environ.get("BERTINPUT_NO_SKIPS") == "1"

# As it was before the package was imported: what an import leaves behind must not be inherited.
ENVIRONMENT = dict(os.environ)

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def without_skip(report: Report) -> Report:
    """Turn a skip into a failure with its reason, if skips are not allowed."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}; BERTINPUT_NO_SKIPS=1 makes this a failure"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See `without_skip`."""
    return without_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """See `without_skip`; a whole file is skipped while it is collected."""
    return without_skip((yield))


def resident(field: str) -> int:
    """Read a field of this process's status in bytes (Linux)."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measured_growth(call: Callable[[], Any]) -> int:
    """Return by how many bytes memory grew at its highest point during `call`.

    Python's and NumPy's own allocations are traced on every system; on Linux the resident memory
    is read as well, so that what compiled code allocates counts too.
    """
    gc.collect()
    watch_resident = CLEAR_REFS.exists()
    if watch_resident:
        # Free pages that malloc keeps would hide an allocation that reuses them.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        try:
            CLEAR_REFS.write_text("5")  # forget the peak so far
        except PermissionError:
            watch_resident = False
    tracemalloc.start()
    try:
        before = resident("VmRSS") if watch_resident else 0
        traced_before, _ = tracemalloc.get_traced_memory()
        call()
        _, traced_peak = tracemalloc.get_traced_memory()
        after = resident("VmHWM") if watch_resident else 0
    finally:
        tracemalloc.stop()
    return max(traced_peak - traced_before, after - before)


@pytest.fixture
def peak_growth() -> Callable[[Callable[[], Any]], int]:
    """The function that measures a call's peak of memory."""
    return measured_growth


def python_run(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter, warnings as errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", textwrap.dedent(code)],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,  # a guard against hanging, no measurement
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def fresh_python() -> Callable[..., str]:
    """The function that runs code in an interpreter of its own."""
    return python_run
