"""The benchmark's own logic, from figures that were made up. Nothing here is timed."""

# ruff: noqa: E402 (the benchmark is found beside the tests, it is not installed)

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmark is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command
from benchmarks import measure, sides
from benchmarks.anatomy import STEPS, anatomy_markdown
from benchmarks.floor import NoFloor, compiled_floor
from benchmarks.groups import GROUPS, growth_name
from benchmarks.machine import Caches
from benchmarks.markdown import as_markdown
from benchmarks.report import as_json, as_text, verdict_lines
from benchmarks.rows import ROWS, Comparison, Figure, Measurement
from benchmarks.sides import Absent, Side, check
from benchmarks.targets import FIGURE_LIMITS, Verdict, floor_limit, verdicts
from benchmarks.timing import Sampler, alternate
from benchmarks.workload import GROWTH, Point, aligned, draw_ids

CACHES = Caches(second=512 << 10, last=32 << 20)

# By group and side: times that reach every target; those of growth are for each token.
TIMES: dict[str, dict[str, float]] = {
    "float32": {
        "layer": 1,
        "function": 2,
        "NumPy": 6,
        "NumPy, kept": 3,
        "PyTorch": 6,
        "ONNX Runtime": 6,
    },
    "float32-fresh": {"layer": 1, "function": 2, "NumPy, fresh": 9},
    "float64": {
        "function": 1,
        "function, float32 tables": 1,
        "NumPy": 5,
        "NumPy, kept": 3,
        "PyTorch": 6,
        "ONNX Runtime": 6,
    },
    "float64-fresh": {"function": 1, "function, float32 tables": 1, "NumPy, fresh": 10},
    "layernorm": {"layer": 1.5, "sum alone": 1, "NumPy": 6, "PyTorch": 6, "ONNX Runtime": 9},
    "layernorm-mapped": {"layer": 2, "sum alone": 1},
    "layernorm-far": {"layer": 1.5, "sum alone": 1, "PyTorch": 6, "ONNX Runtime": 9},
    "floor": {"layer": 1, "floor": 1},
    "threads": {
        "1 thread": 1.8,
        "2 threads": 1,
        "automatic": 1,
        "1 thread, new result": 1.8,
        "2 threads, new result": 1,
    },
    "table-types": {f"{kind} tables": 1 for kind in ("float32", "float16", "bfloat16", "int8")},
    "growth": {growth_name(tokens): 1 for tokens in GROWTH},
    "anatomy": {call: 1 for step in STEPS for call in (step.call, step.beyond) if call},
}
ERRORS = {"layer": 1e-7, "PyTorch": 2e-7}
VERSIONS: dict[str, Any] = {
    "python": "3",
    "numpy": "2",
    "torch": None,
    "onnxruntime": "1",
    "bertinput": {"instruction_set": "baseline"},
}

# A side that becomes slower (or a peer that becomes faster), and what is missed then.
BREAKS = [
    ("floor", "layer", 2.5, "inside compiled code, against C floor"),
    ("float32", "NumPy", 0.3, "prepared layer, out=, against NumPy"),
    ("float32-fresh", "NumPy, fresh", 0.3, "prepared layer, out=, against NumPy, fresh"),
    ("float32", "PyTorch", 0.3, "prepared layer, out=, against PyTorch"),
    ("float32", "ONNX Runtime", 0.3, "prepared layer, out=, against ONNX Runtime"),
    ("float64", "NumPy", 0.5, "float64 tables, new result, against NumPy"),
    ("float64-fresh", "NumPy, fresh", 0.2, "float64 tables, new result, against NumPy, fresh"),
    ("float64", "function, float32 tables", 1.5, "tables cast beforehand), against NumPy"),
    ("float64-fresh", "NumPy, fresh", 0.3, "tables cast beforehand), against NumPy, fresh"),
    ("layernorm", "sum alone", 0.5, "tables at 64 bytes, against sum alone"),
    ("layernorm-mapped", "layer", 1.2, "mapped tables, against sum alone"),
    ("layernorm", "PyTorch", 0.8, "LayerNorm: prepared layer, out=, against PyTorch"),
    ("layernorm", "ONNX Runtime", 0.8, "LayerNorm: prepared layer, out=, against ONNX Runtime"),
    ("float32", "layer", 2, "one token: layer.sum, out=, against NumPy's sum"),
    ("float32", "function", 2, "one token: the function, float32, out=, against NumPy's sum"),
    ("threads", "1 thread, new result", 1.2, "new result, 1 thread, against out given"),
    ("threads", "2 threads, new result", 1.2, "new result, 2 threads, against out given"),
    ("threads", "1 thread", 0.9, "two threads, against one thread"),
    ("threads", "automatic", 1.2, "against the better of one and two threads"),
    ("table-types", "float16 tables", 1.4, "float16 tables, against float32 tables"),
    ("table-types", "bfloat16 tables", 1.4, "bfloat16 tables, against float32 tables"),
    ("table-types", "int8 tables", 1.4, "int8 tables, against float32 tables"),
    ("growth", growth_name(GROWTH[-1]), 1.4, "cost of a token as work grows"),
]


def made_up(broken: str = "", side: str = "", factor: float = 1.0) -> list[Measurement]:
    """Measurements that reach every target, but for one side of one group."""
    found = []
    for group, times in TIMES.items():
        for point in GROUPS[group].points:
            for ids in GROUPS[group].ids:
                seconds = {}
                for name, time in times.items():
                    work = int(name.split()[0]) if group == "growth" else point.tokens
                    slower = factor if (group, name) == (broken, side) else 1.0
                    # rounds in which the machine is slower must not matter
                    seconds[name] = tuple(
                        1e-6 * work * time * slower * drift for drift in (1.0, 1.5, 3.0)
                    )
                errors = ERRORS if group.startswith("layernorm") else {}
                found.append(Measurement(group, point, ids, seconds, {}, errors))
    return found


def made_up_figures() -> list[Figure]:
    return [Figure(name, limit / 2, unit, "") for name, (limit, unit) in FIGURE_LIMITS.items()]


def missed(measurements: list[Measurement], figures: list[Figure]) -> list[Verdict]:
    return [each for each in verdicts(measurements, figures, CACHES) if each.missed]


def about(**settings: Any) -> dict[str, Any]:
    usual = {"quick": False, "rounds": 3}
    return {
        "machine": {"cpu": "a CPU", "cpus_allowed": 2},
        "versions": VERSIONS,
        "settings": usual | settings,
        "expressions": {"float32": {"NumPy": "T[t] + P[:S] + G[g]"}},
    }


# ---- targets ----


def test_figures_that_reach_every_target_miss_none() -> None:
    held = verdicts(made_up(), made_up_figures(), CACHES)
    assert [str(each) for each in held if each.missed or not each.measured] == []


@pytest.mark.parametrize(("group", "side", "factor", "what"), BREAKS)
def test_a_miss_is_named_wherever_it_is(group: str, side: str, factor: float, what: str) -> None:
    found = missed(made_up(group, side, factor), made_up_figures())
    named = [each for each in found if each.what.endswith(what) or each.what.startswith(what)]
    assert named
    for each in named:
        lines = verdict_lines([each])
        assert lines[0].startswith(f"MISSED {each.what} at {each.where}: ")
        assert each.wanted in lines[0]


def test_every_target_can_be_missed() -> None:
    every = {
        (each.what, each.wanted) for each in verdicts(made_up(), made_up_figures(), CACHES)
    } - {(each.what, each.wanted) for each in missed(made_up(), made_up_figures())}
    failed = {
        (each.what, each.wanted)
        for group, side, factor, _ in [
            *BREAKS,
            ("floor", "layer", 1.35, ""),
            ("float32", "layer", 2.5, ""),
        ]
        for each in missed(made_up(group, side, factor), made_up_figures())
    }
    far = [replace(each, errors={"layer": 3e-7, "PyTorch": 2e-7}) for each in made_up()]
    failed |= {(each.what, each.wanted) for each in missed(far, made_up_figures())}
    double = [replace(each, value=3 * each.value + 1) for each in made_up_figures() if each.unit]
    failed |= {(each.what, each.wanted) for each in missed(made_up(), double)}
    assert every - failed == set()


def test_one_point_is_enough_to_miss() -> None:
    measurements = made_up()
    at = next(
        place
        for place, each in enumerate(measurements)
        if each.group == "float32" and each.point == Point(8, 128, 768) and each.ids == "zipf"
    )
    slow = {**measurements[at].seconds, "layer": tuple(measurements[at].seconds["NumPy"])}
    measurements[at] = replace(measurements[at], seconds=slow)
    lines = [str(each) for each in missed(measurements, made_up_figures())]
    assert len(lines) == 3  # NumPy, PyTorch, ONNX Runtime
    assert all("(8, 128, 768) zipf: 1 times instead of >= 3 times" in line for line in lines)


def test_a_figure_that_is_no_number_is_missed() -> None:
    assert Verdict("what", "", float("nan"), 1.0, at_least=True).missed
    assert Verdict("what", "", float("nan"), 1.0, at_least=False).missed


def test_what_is_not_there_is_named_and_neither_reached_nor_missed() -> None:
    reason = "torch is not installed"
    without = [
        replace(
            each,
            seconds={name: times for name, times in each.seconds.items() if name != "PyTorch"},
            errors={name: error for name, error in each.errors.items() if name != "PyTorch"},
            absent={"PyTorch": reason} if "PyTorch" in each.seconds else {},
        )
        for each in made_up()
        if each.group != "growth"
    ]
    held = verdicts(without, [], CACHES)
    blank = [each for each in held if not each.measured]
    assert not any(each.missed for each in held)
    torch = [each for each in blank if each.reason == reason]
    assert len(torch) == 5  # each point and mean of the sum, LayerNorm, and two errors
    assert any(each.reason == "the group growth was not run" for each in blank)
    assert sum(each.reason == "it was not run" for each in blank) == len(FIGURE_LIMITS)
    lines = verdict_lines(held)
    assert sum(line.startswith("NOT MEASURED") for line in lines) == len(blank)
    assert lines[-1].endswith(f"0 miss it, {len(blank)} were not measured")


def test_a_figure_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="unheard of"):
        verdicts(made_up(), [Figure("unheard of", 1.0, "ms", "")], CACHES)


@pytest.mark.parametrize(
    ("point", "limit"),
    [
        (Point(1, 128, 384), 2.0),  # 2 x 192 KiB fit into 512 KiB, 3 x 192 KiB do not
        (Point(1, 64, 384), 1.6),  # all three fit
        (Point(1, 128, 768), 1.6),  # two do not fit any more
        (Point(1, 512, 768), 1.3),
        (Point(32, 128, 768), 1.3),
        (Point(32, 512, 1024), 1.0),
    ],
)
def test_the_limit_beside_the_floor_follows_the_caches(point: Point, limit: float) -> None:
    assert floor_limit(CACHES)(point) == limit
    assert floor_limit(Caches(None, None))(point) == min(limit, 1.6)


def test_ratios_are_taken_round_by_round() -> None:
    ours, theirs = (1.0, 2.0, 4.0), (3.0, 6.0, 12.0)
    assert Comparison(Point(1, 1, 1), "zipf", ours, theirs).ratio == (3.0, 3.0, 3.0)
    cost = Comparison(Point(1, 1, 1), "zipf", ours, theirs, cost=True).ratio
    assert cost == pytest.approx((1 / 3,) * 3)


# ---- sides ----


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and ONNX Runtime take seconds to load."""
    monkeypatch.setattr(sides, "installed", lambda name: None)


@pytest.mark.usefixtures("no_peers")
def test_every_side_that_a_row_names_exists_and_computes_what_it_should() -> None:
    named: dict[str, set[str]] = {}
    for group, made in GROUPS.items():
        point = made.quick_points[-1]
        found = made.sides(point, draw_ids(point, "zipf", True), True)
        named[group] = {side.name for side in found}
        for side in found:
            if isinstance(side, Side):
                check(side)
    for row in ROWS:
        for meeting in row.peers.values():
            assert {row.ours, *meeting.names} <= named[meeting.group]
    assert {step.call for step in STEPS} <= named["anatomy"]
    assert {step.beyond for step in STEPS if step.beyond} <= named["anatomy"]


def test_a_side_that_computes_something_else_is_refused() -> None:
    def side(value: float, tolerance: float = 0.0, last: int = 0) -> Side:
        result = np.array([[0.0, 0.0], [1.0, value]], np.float32)
        expected = np.ones((1, 2), np.float32)
        return Side("wrong", "a + 0", {"a": result}, lambda: expected, tolerance, last=last)

    assert check(side(1.0, last=1)) == 0
    with pytest.raises(ArithmeticError, match="not the bits"):
        check(side(np.nextafter(np.float32(1), np.float32(2)), last=1))
    with pytest.raises(ArithmeticError, match="off by"):
        check(side(1.1, 1e-2, last=1))
    with pytest.raises(ArithmeticError, match="instead of"):
        check(side(1.0))


@pytest.mark.usefixtures("no_peers")
def test_a_group_is_measured_with_what_is_there() -> None:
    found, statements = measure.measure("float32", Point(1, 1, 48), 2, True)
    assert [each.ids for each in found] == ["uniform", "zipf"]
    for each in found:
        assert set(each.absent) == {"PyTorch", "ONNX Runtime"}
        assert set(each.seconds) == set(statements) == set(TIMES["float32"]) - set(each.absent)
        assert all(len(seconds) == 2 for seconds in each.seconds.values())


def test_a_side_that_repeats_itself_is_timed_by_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that a call moves: 7 seconds for the way in and out, 2 for each repetition."""
    now = 0.0

    def work(calls: int) -> None:
        nonlocal now
        now += 7 + 2 * calls

    side = Side("repeats", "work(calls)", {"work": work, "calls": 1}, None, repeats=True)
    sampler = Sampler(side)
    monkeypatch.setattr(sampler.timer, "timer", lambda: now)
    assert sampler.total(4) == 8
    assert sampler.calls_per_sample(1.0) == 4  # the least
    assert sampler.calls_per_sample(100.0) >= 50


def test_nothing_to_time_is_no_error() -> None:
    assert alternate([], 3, 1e-3) == ({}, {})


# ---- the floor ----


def test_the_floor_copies_the_rows_of_the_ids_and_nothing_else() -> None:
    try:
        copy_rows = compiled_floor()
    except NoFloor as error:
        pytest.skip(str(error))
    table = np.arange(50, dtype=np.float32).reshape(10, 5)
    ids = np.array([3, 0, 9, 3], np.int64)
    out = np.full((6, 5), -1, np.float32)
    start = out[1:].ctypes.data
    for calls in (0, 1, 3):
        out.fill(-1)
        copy_rows(table.ctypes.data, ids.ctypes.data, len(ids), table.strides[0], start, calls)
        assert (out[[0, -1]] == -1).all()
        assert np.array_equal(out[1:-1], table[ids] if calls else np.full((4, 5), -1))


def test_without_a_compiler_the_floor_is_absent_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    compiled_floor.cache_clear()
    point = Point(1, 2, 3)
    tables = sides.Tables(*(aligned((4, 3), np.float32) for _ in range(3)))
    try:
        found = sides.floor_sides(point, tables, draw_ids(point, "uniform", True))
    finally:
        compiled_floor.cache_clear()
    assert all(isinstance(side, Absent) for side in found)
    assert all("no-such-compiler" in side.reason for side in found if isinstance(side, Absent))


# ---- what is written ----


def test_text_and_json_hold_every_row_and_verdict() -> None:
    measurements, figures = made_up("float32", "NumPy", 0.1), made_up_figures()
    held = verdicts(measurements, figures, CACHES)
    text = as_text(about() | {"notes": sides.NOTES}, measurements, figures)
    for row in ROWS:
        assert row.title in text
    assert "LOSS 0.60x" in text
    content = json.loads(json.dumps(as_json(about(), measurements, figures, held)))
    assert sum(each["missed"] for each in content["targets"]) == sum(e.missed for e in held) > 0
    assert len(content["samples"]) == len(measurements)
    assert {each["row"] for each in content["ratios"]} == {row.title for row in ROWS}


def test_text_and_json_do_with_nothing_measured() -> None:
    held = verdicts([], [], CACHES)
    assert not any(each.measured for each in held)
    assert "the group float64 was not run" in as_text(about() | {"notes": {}}, [], [])
    json.dumps(as_json(about(), [], [], held))
    assert as_markdown(about(), [], held).count("not measured") == len(
        {(each.what, each.where.startswith("geometric mean")) for each in held}
    )


def test_markdown_shows_losses_and_misses() -> None:
    figures = made_up_figures()
    measurements = made_up("float32", "NumPy", 0.1)
    lines = as_markdown(about(), measurements, verdicts(measurements, figures, CACHES)).split("\n")
    tables = [line for line in lines if line.startswith("|")]
    width = tables[0].count("|")
    speed = [line for line in tables if line.count("|") == width]
    assert len(speed) == 2 + len(GROUPS["float32"].points) + 1
    assert sum("| **0.60** |" in line for line in speed) == len(GROUPS["float32"].points) + 1
    assert any(line.startswith("Losses: NumPy in 0.60 of our time") for line in lines)
    missed_line = next(line for line in tables if "prepared layer, out=, against NumPy |" in line)
    assert ">= 3 times | **0.6 times** |" in missed_line
    none = as_markdown(about(), made_up(), verdicts(made_up(), figures, CACHES))
    assert "Losses: none" in none
    assert "**" not in none


@pytest.mark.parametrize(
    ("ending", "start", "quick"), [("png", b"\x89PNG", False), ("svg", b"<?xml", True)]
)
def test_the_picture_is_drawn(tmp_path: Path, ending: str, start: bytes, quick: bool) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from benchmarks.picture import draw

    file = tmp_path / f"picture.{ending}"
    draw(file, about(quick=quick), made_up(), CACHES)
    content = file.read_bytes()
    assert content.startswith(start)
    if ending == "svg":  # where each text is named in a comment
        for text in (b"NumPy, fresh", b"PyTorch", b"ONNX Runtime", b"C floor", b"Growth", b"VOID"):
            assert text in content


def test_the_picture_does_with_nothing_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from benchmarks.picture import draw

    draw(tmp_path / "empty.png", about(), [], Caches(None, None))
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_anatomy_subtracts_round_by_round() -> None:
    seconds = dict.fromkeys(TIMES["anatomy"], (1e-9, 2e-9, 3e-9))
    seconds["one token"] = (11e-9, 12e-9, 13e-9)
    lines = anatomy_markdown(seconds)
    assert len(lines) == 2 + len(STEPS)
    assert "| the full width | +10 | +10 to +10 |" in lines
    assert "| in all: `layer.sum`, ids and out given | 12 | 12 to 12 |" in lines


# ---- the command ----


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[list[Measurement], list[str]], int]:
    """The command with figures that were made up."""

    def run(measurements: list[Measurement], options: list[str]) -> int:
        monkeypatch.setattr(command, "measure_all", lambda *_: (measurements, {}))
        monkeypatch.setattr(command, "measure_processes", lambda *_: made_up_figures())
        monkeypatch.setattr(command, "cache_sizes", lambda: CACHES)
        monkeypatch.setattr(command, "versions", lambda: VERSIONS)  # which loads PyTorch
        return command.main(options)

    return run


def test_check_exits_with_1_only_for_misses(
    run: Callable[[list[Measurement], list[str]], int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    slow = made_up("table-types", "int8 tables", 1.4)
    assert run(made_up(), ["--check"]) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert run(slow, []) == 0
    assert run(slow, ["--check"]) == 1
    printed = capsys.readouterr().out
    assert "MISSED float32 sum of int8 tables, against float32 tables at (1, 1, 768)" in printed
    without = [each for each in made_up() if each.group != "threads"]
    files = {name: tmp_path / name for name in ("json", "markdown")}
    options = [f"--{name}={file}" for name, file in files.items()]
    assert run(without, ["--check", *options]) == 0
    assert "NOT MEASURED float32 sum, two threads" in capsys.readouterr().out
    assert json.loads(files["json"].read_text())["settings"]["rounds"] >= 9
    assert files["markdown"].read_text().startswith("One run on ")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--check", "--quick"], "--check needs"),
        (["--check", "--rounds", "8"], "--check needs"),
        (["--rounds", "0"], "at least 1"),
        (["--only", "float16"], "invalid choice"),
        (["--json", "no/such/folder/file"], "no directory"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(options)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err
