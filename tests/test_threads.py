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


# what whoever runs the tests wants of OpenMP is not what they are about
WITHOUT_OPENMP = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}


def run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter, which must end well within a minute."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=WITHOUT_OPENMP | environment,
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
    """Whatever number is asked for, sum or LayerNorm, from any of the caller's threads."""
    run(
        TEAM
        + """
    from concurrent.futures import ThreadPoolExecutor
    from bertinput import BertEmbeddings
    layer = BertEmbeddings(*tables, layer_norm=(np.ones(768), None, 1e-12))
    small = [ids[:0], ids[:1, :1], ids[0, :8], ids[0], ids[:4], ids[:4].reshape(1, 512)]
    workers = ThreadPoolExecutor(2)
    list(workers.map(call, [1] * 4))
    before = threads()
    def calls():
        for some in small:
            for n in (None, 1, 2, 64):
                call(n, some), layer(some, num_threads=n), layer.sum(some, num_threads=n)
                layer(some, dtype=np.float64, num_threads=n)
        call(1), layer(ids, num_threads=1)
    calls()
    for done in [workers.submit(calls) for _ in range(4)]:
        done.result()
    assert threads() == before
    call(2)
    assert threads() == before + 1
    for _ in range(20):
        call(2), call()
        layer(ids, num_threads=2)
    assert threads() == before + 1
    """
    )


@linux
@several
@pytest.mark.parametrize("when", ["before import", "before a call", "in one thread"])
def test_on_one_cpu_no_team_is_started(when: str) -> None:
    """As taskset leaves it, or a service that pins its workers; numbers asked for, too."""
    run(
        f"""
    import os
    when, pin = {when!r}, {{min(os.sched_getaffinity(0))}}
    if when == "before import":
        os.sched_setaffinity(0, pin)
    """
        + TEAM
        + """
    from threading import Thread
    def pinned():
        os.sched_setaffinity(0, pin)
        before = threads()
        one = call(1)
        for n in (None, 2, 7):
            assert (call(n) == one).all()
        assert threads() == before
        done.append(True)
    done = []
    if when == "in one thread":
        thread = Thread(target=pinned)
        thread.start()
        thread.join()
        before = set(os.listdir("/proc/self/task"))  # that thread may not be gone yet
        call(2)  # the others go where they like
        assert len(set(os.listdir("/proc/self/task")) - before) == 1
    else:
        pinned()
    assert done
    """
    )


@linux
@several
@pytest.mark.parametrize(
    ("quota", "omp", "number", "team"),
    [
        ("max", None, None, 2),
        ("100000", None, None, 1),
        ("50000", None, None, 1),
        ("150000", None, None, 2),
        ("100000", "2", None, 2),  # said by the user, it counts more than the quota
        ("max", "1", None, 1),
        ("100000", "1", 2, 2),  # and a number in the call more than that
    ],
)
def test_quota_and_environment_limit_the_choice(
    tmp_path: Path, quota: str, omp: str | None, number: int | None, team: int
) -> None:
    root = cgroup(tmp_path, "0::/service", {"service/cpu.max": f"{quota} 100000"})
    run(
        TEAM
        + f"""
    from bertinput import _threads
    machines = _threads._quota
    _threads._quota = lambda: machines({root!r})
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    before = threads()
    call({number})
    assert threads() == before + {team} - 1
    """,
        **({} if omp is None else {"OMP_NUM_THREADS": omp}),
    )


@linux
@several
@pytest.mark.parametrize("positions", ["table", "given"])
@pytest.mark.parametrize("normed", [False, True])
def test_one_long_sequence_is_shared_too(positions: str, normed: bool) -> None:
    """As many short ones are: the same bits, half of the work on another thread."""
    run(f"""
    import os, time
    import numpy as np
    from bertinput import BertEmbeddings
    rng = np.random.default_rng(8)
    given, normed = {positions == "given"}, {normed}
    rows = (500, 512 if given else 8192, 2)
    layer = BertEmbeddings(
        *(rng.standard_normal((n, 768)).astype(np.float32) for n in rows),
        layer_norm=(rng.standard_normal(768), None, 1e-12),
    )
    stage = layer if normed else layer.sum
    ids = rng.integers(0, 500, (1, 8192))
    options = {{"position_ids": rng.integers(0, 512, (1, 8192))}} if given else {{}}
    own = set(os.listdir("/proc/self/task"))
    expected = stage(ids, ids % 2, num_threads=1, **options)
    places = options.get("position_ids", np.arange(8192))
    short = stage(
        ids.reshape(64, 128), ids.reshape(64, 128) % 2, position_ids=places.reshape(64, 128)
    )
    assert (short.reshape(expected.shape) == expected).all()

    def spent():  # CPU time of each thread: Linux numbers their clocks so
        team = set(os.listdir("/proc/self/task")) - own
        return time.thread_time(), *(time.clock_gettime(~int(t) << 3 | 6) for t in team)

    def call(n):
        stage(ids, ids % 2, out=out, num_threads=n, **options)

    out = np.empty_like(expected)
    call(2)
    assert len(spent()) == 2
    for n in (2, None):
        begun = spent()
        for _ in range(8):
            out.fill(0)
            call(n)
            assert (out == expected).all()
        mine, others = (after - before for after, before in zip(spent(), begun))
        begun = time.thread_time()
        for _ in range(8):
            out.fill(0)
            assert not (out == expected).all()
        mine -= time.thread_time() - begun  # what filling and comparing took
        print(n, mine, others)
        assert others > (mine + others) / 5
    """)


@linux
@several
def test_after_a_call_no_thread_keeps_spinning() -> None:
    """Twenty naps of a service that has just called; a spinning thread would fill each of them."""
    run(
        TEAM
        + """
    import time
    out = np.empty((*ids.shape, 768), np.float32)
    before = threads()
    awake = 0
    for _ in range(20):
        bert_embeddings(ids, ids % 2, *tables, dtype=np.float32, out=out, num_threads=2)
        begun = time.process_time()
        time.sleep(0.015)
        awake += time.process_time() - begun
    assert threads() == before + 1
    assert awake < 0.06, awake
    """
    )


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
