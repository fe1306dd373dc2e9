"""The tables of the README."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report import duration
from benchmarks.rows import FLOOR, LAYER, LAYERNORM, RACES, SEED, Measurement, Row
from benchmarks.targets import Verdict, amount
from benchmarks.timing import spread
from benchmarks.workload import Point

__all__ = ["as_markdown"]

COLUMNS: tuple[tuple[str, Row, tuple[str, ...]], ...] = (
    ("float32 sum", LAYER, ("NumPy", "PyTorch", "ONNX Runtime")),
    ("float64 call", SEED, ("NumPy", "NumPy, fresh")),
    ("with LayerNorm", LAYERNORM, ("PyTorch", "ONNX Runtime")),
)


def table(lines: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Cells as Markdown; the columns in `left` flush left."""
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    marks = ["---" if column in left else "---:" for column in range(len(lines[0]))]
    return [head, "| " + " | ".join(marks) + " |", *rest]


def factor(value: float) -> str:
    """A ratio in two digits, a loss in bold."""
    text = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if value >= 1 else f"**{value:.2f}**"


def speed_table(measurements: Sequence[Measurement]) -> list[str]:
    """Our times with uniform ids, and how many times longer each peer took."""
    lines: dict[Point | str, list[str]] = {"": ["batch, tokens, width"]}
    points = list(
        dict.fromkeys(
            found.point
            for _, row, peers in COLUMNS
            for peer in peers
            for found in row.comparisons(peer, measurements)
        )
    )
    lines |= {point: [", ".join(map(str, point))] for point in points}
    lines["mean"] = ["geometric mean"]
    for title, row, peers in COLUMNS:
        compared = {
            peer: {
                found.point: found
                for found in row.comparisons(peer, measurements)
                if found.ids == "uniform"
            }
            for peer in peers
        }
        ours = {
            point: duration(spread(found.ours).median)
            for each in reversed(compared.values())
            for point, found in each.items()
        }
        lines[""] += [title, *peers]
        for point in points:
            lines[point].append(ours.get(point, "-"))
            for each in compared.values():
                ratio = each[point].ratio.median if point in each else None
                lines[point].append("-" if ratio is None else factor(ratio))
        lines["mean"].append("")
        for each in compared.values():
            ratios = [found.ratio.median for found in each.values()]
            lines["mean"].append(factor(statistics.geometric_mean(ratios)) if ratios else "-")
    floor = {
        found.point: found.ratio.median
        for found in FLOOR.comparisons("C floor", measurements)
        if found.ids == "uniform"
    }
    lines[""].append("sum / C floor")
    for point in points:
        lines[point].append(f"{floor[point]:.2f}" if point in floor else "-")
    lines["mean"].append("")
    return table(list(lines.values()), left={0})


def losses(measurements: Sequence[Measurement]) -> str:
    """Every comparison with a peer, whatever the ids, in which the peer was faster."""
    lost = [
        f"{peer} in {found.ratio.median:.2f} of our time ({row.title}, {found.point} {found.ids})"
        for row in RACES
        for peer in row.peers
        for found in row.comparisons(peer, measurements)
        if found.ratio.median < 1
    ]
    return "; ".join(lost) if lost else "none, with either draw of ids"


def target_table(verdicts: Iterable[Verdict]) -> list[str]:
    """For each target the worst figure and where it was."""
    groups: dict[tuple[str, bool, bool], list[Verdict]] = {}
    for verdict in verdicts:
        mean = verdict.where.startswith("geometric mean")
        groups.setdefault((verdict.what, verdict.at_least, mean), []).append(verdict)
    lines = [["what", "to reach", "worst figure", "where", "misses"]]
    for (what, _, _), each in groups.items():
        worst = max(each, key=lambda verdict: (verdict.measured, verdict.distance))
        misses = sum(verdict.missed for verdict in each)
        unmeasured = sum(not verdict.measured for verdict in each)
        if worst.figure is None:
            lines.append([what, worst.wanted, "not measured", worst.reason, "-"])
            continue
        told = f"{misses} of {len(each) - unmeasured}" if misses else "0"
        figure = amount(worst.figure, worst.unit)
        lines.append(
            [
                what,
                worst.wanted,
                f"**{figure}**" if worst.missed else figure,
                worst.where,
                told + (f", {unmeasured} not measured" if unmeasured else ""),
            ]
        )
    return table(lines, left={0, 1, 3})


def taken_on(about: Mapping[str, Any]) -> str:
    """Machine and versions in one sentence."""
    machine, versions = about["machine"], about["versions"]
    peers = {"NumPy": "numpy", "PyTorch": "torch", "ONNX Runtime": "onnxruntime"}
    named = ", ".join(
        f"{name} {versions[key]}" if versions[key] else f"no {name}" for name, key in peers.items()
    )
    return (
        f"One run on {machine['cpu']} ({machine['cpus_allowed']} CPUs, kernels for "
        f"{versions['bertinput']['instruction_set']}), Python {versions['python']}, {named}; "
        f"medians of {about['settings']['rounds']} rounds."
    )


def as_markdown(
    about: Mapping[str, Any], measurements: Sequence[Measurement], verdicts: Sequence[Verdict]
) -> str:
    """The table of times, the losses, and the targets."""
    void = ["A smoke test: these figures are void.", ""] if about["settings"]["quick"] else []
    lines = [
        *void,
        taken_on(about)
        + " Our time for a call on one thread, uniform ids, and how many times longer each peer "
        "took; bold: the peer was faster. The last column is our sum as a multiple of a bare copy "
        "of the token rows in C.",
        "",
        *speed_table(measurements),
        "",
        f"Losses: {losses(measurements)}.",
        "",
        "Each target at its worst point; bold: missed.",
        "",
        *target_table(verdicts),
    ]
    return "\n".join(lines) + "\n"
