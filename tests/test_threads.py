"""How many threads a call takes, and what fork changes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from bertinput import _core, _threads, bert_embeddings, build_info

TOKENS = 4096  # with rows of 768 elements: enough work for a team of threads


def run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter, which must end well within a minute."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def cgroup(root: Path, line: str, files: dict[str, str]) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("line", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "nonsense"}, math.inf),
        ("0::/", {}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "400000 100000"}, 1),
        ("0::/../outside", {"cpu.max": "300000 100000"}, 3),
        (
            "4:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        (
            "4:cpu,cpuacct:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("4:memory:/a", {"memory/a/cpu.cfs_quota_us": "50000"}, math.inf),
    ],
)
def test_quota(tmp_path: Path, line: str, files: dict[str, str], cpus: float) -> None:
    assert _threads._quota.__wrapped__(cgroup(tmp_path, line, files)) == cpus


def test_quota_without_cgroups(tmp_path: Path) -> None:
    assert _threads._quota.__wrapped__(str(tmp_path)) == math.inf


def test_available_is_capped_by_quota_and_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(_threads, "affinity", lambda: 8)
    for quota, cpus in ((math.inf, 8), (2.5, 3), (0.2, 1), (64, 8)):
        monkeypatch.setattr(_threads, "_quota", lambda quota=quota: quota)
        assert _threads.available() == cpus
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # said by the user: the quota does not count
    assert _threads.available() == 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_affinity_is_read_at_each_call() -> None:
    before = os.sched_getaffinity(0)
    assert _threads.affinity() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert _threads.affinity() == 1
    finally:
        os.sched_setaffinity(0, before)


TEAM = f"""
    import os
    import numpy as np
    from bertinput import bert_embeddings
    rng = np.random.default_rng(5)
    tables = [rng.standard_normal((rows, 768)).astype(np.float32) for rows in (500, 512, 2)]
    ids = rng.integers(0, 500, ({TOKENS // 128}, 128))
    def threads():
        return len(os.listdir("/proc/self/task"))
    def call(n=None, ids=ids):
        return bert_embeddings(ids, ids % 2, *tables, dtype=np.float32, num_threads=n)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
several = pytest.mark.skipif(
    build_info()["openmp"] is None or _threads.affinity() < 2,
    reason="needs OpenMP and two CPUs to start a team",
)


@linux
def test_import_starts_no_thread_and_leaves_the_environment_alone() -> None:
    run("""
        import os, numpy
        before, threads = dict(os.environ), os.listdir("/proc/self/task")
        import bertinput
        assert dict(os.environ) == before
        assert os.listdir("/proc/self/task") == threads
    """)


@linux
@several
def test_only_large_work_starts_threads() -> None:
    run(
        TEAM
        + """
    before = threads()
    call(ids=ids[:2]); call(2, ids[:2]); call(1)
    assert threads() == before
    call(2)
    assert threads() == before + 1
    """
    )


@linux
@several
def test_omp_num_threads_limits_the_choice() -> None:
    code = TEAM + "    before = threads(); call(); assert threads() == before + {}\n"
    run(code.format(0), OMP_NUM_THREADS="1")
    run(code.format(1), OMP_NUM_THREADS="2")


@linux
@several
def test_a_number_larger_than_the_cpus_starts_no_more_threads() -> None:
    run(
        TEAM
        + """
    before = threads()
    call(100_000)
    assert threads() - before < len(os.sched_getaffinity(0))
    """
    )


@linux
@several
def test_no_thread_to_be_had_is_no_end_of_the_process() -> None:
    """GCC's runtime would end it; the thread's stack does not fit into what is left."""
    run(
        TEAM
        + """
    import resource
    expected, out = call(1), np.empty((*ids.shape, 768), np.float32)
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (4 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = threads()
    bert_embeddings(ids, ids % 2, *tables, dtype=np.float32, out=out, num_threads=2)
    bert_embeddings(ids, ids % 2, *tables, dtype=np.float32, out=out)
    assert threads() == before
    assert (out == expected).all()
    """
    )


@linux
@several
def test_a_first_large_call_opens_no_file_that_it_needs() -> None:
    run(
        TEAM
        + """
    import resource
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit))
    call()
    """
    )


@linux
@several
def test_a_team_rounds_as_its_caller_does() -> None:
    """A mode that the caller set after the team began holds for all threads."""
    run(
        TEAM
        + """
    import ctypes
    libm = ctypes.CDLL("libm.so.6")
    call(2)
    rounded = {}
    for mode in (0, 0x400):  # to nearest, downward (x86)
        if libm.fesetround(mode) == 0:
            rounded[mode] = call(1), call(2)
    libm.fesetround(0)
    for one, two in rounded.values():
        assert (one == two).all()
    if len(rounded) == 2 and os.uname().machine == "x86_64":
        assert (rounded[0][0] != rounded[0x400][0]).any()
    """
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@several
def test_a_forked_child_works_and_starts_no_team() -> None:
    run(
        TEAM
        + """
    import signal
    import bertinput._core as core
    expected = call(2)
    assert not core.in_forked_child()
    for nested in (False, True):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            if nested:
                inner = os.fork()
                if inner:
                    os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
            fine = core.in_forked_child() and threads() == 1
            fine = fine and (call(2) == expected).all() and (call() == expected).all()
            os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (call(2) == expected).all()
    """
    )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(method: str) -> None:
    import multiprocessing

    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    rng = np.random.default_rng(6)
    tables = [rng.standard_normal((rows, 768)) for rows in (50, 512, 2)]
    ids = rng.integers(0, 50, (TOKENS // 512, 512))
    expected = bert_embeddings(ids, ids % 2, *tables, num_threads=2)
    code = f"""
        import multiprocessing, numpy as np
        from bertinput import bert_embeddings
        if __name__ == "__main__":
            rng = np.random.default_rng(6)
            tables = [rng.standard_normal((rows, 768)) for rows in (50, 512, 2)]
            ids = rng.integers(0, 50, ({TOKENS // 512}, 512))
            bert_embeddings(ids, ids % 2, *tables, num_threads=2)
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                results = pool.starmap(bert_embeddings, [(ids, ids % 2, *tables)] * 2)
            import hashlib
            for result in results:
                print(hashlib.sha256(result.tobytes()).hexdigest())
    """
    import hashlib

    told = run(code).split()
    assert told == [hashlib.sha256(expected.tobytes()).hexdigest()] * 2


def test_no_child_here() -> None:
    assert not _core.in_forked_child()
