"""The tables on the screen and the JSON file."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.anatomy import anatomy_markdown
from benchmarks.groups import growth_name
from benchmarks.rows import ONE_TOKEN, ROWS, Figure, Measurement, Row
from benchmarks.sides import NOTES
from benchmarks.targets import Verdict, amount
from benchmarks.timing import Spread, ratio, spread
from benchmarks.workload import GROWTH

__all__ = ["as_json", "as_text", "duration", "verdict_lines"]


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds:.2f} s"


def times(value: Spread, cost: bool) -> str:
    """A ratio with its quartiles; where a peer is faster, it is marked."""
    mark = "LOSS " if value.median < 1 and not cost else ""
    return f"{mark}{value.median:.2f}x [{value.low:.2f}-{value.high:.2f}]"


def in_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells under each other, the first two flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def row_table(row: Row, measurements: Sequence[Measurement]) -> list[str]:
    """Our time and the ratio to each peer at every point, and the geometric means."""
    compared = {peer: row.comparisons(peer, measurements) for peer in row.peers}
    ours = {
        (found.point, found.ids): spread(found.ours).median
        for each in reversed(compared.values())  # of several groups the first
        for found in each
    }
    absent = [
        f"(not measured: {peer}: {row.why_absent(peer, measurements)})"
        for peer, each in compared.items()
        if not each
    ]
    reading = "bertinput / peer" if row.cost else "peer / bertinput"
    title = [f"{row.title}  ({reading})", *absent]
    if not ours:
        return title
    lines = [["(B, S, H)", "ids", "bertinput"]]
    lines += [[str(point), ids, duration(ours[point, ids])] for point, ids in ours]
    lines.append(["geometric mean", "", ""])
    for peer, each in compared.items():
        if each:
            at = {(found.point, found.ids): found.ratio for found in each}
            mean = statistics.geometric_mean(value.median for value in at.values())
            cells = [times(at[where], row.cost) if where in at else "-" for where in ours]
            column = [peer, *cells, f"{mean:.2f}x"]
            for line, cell in zip(lines, column, strict=True):
                line.append(cell)
    return [*title, *in_columns(lines)]


def one_token_table(measurements: Sequence[Measurement]) -> list[str]:
    """What a call costs when there is next to nothing to compute."""
    lines = [["call", "ids", "bertinput", "NumPy", "bertinput / NumPy"]]
    for row in ONE_TOKEN:
        for peer in row.peers:
            for found in row.comparisons(peer, measurements):
                share = found.ratio
                lines.append(
                    [
                        f"{row.title}, beside {peer}",
                        found.ids,
                        duration(spread(found.ours).median),
                        duration(spread(found.theirs).median),
                        f"{share.median:.2f} [{share.low:.2f}-{share.high:.2f}]",
                    ]
                )
    return ["one token", *in_columns(lines)]


def growth_table(measurements: Sequence[Measurement]) -> list[str]:
    """Cost of a token from the smallest call to the largest."""
    lines = [["tokens", "ids", "ns for each token", "of the cheapest"]]
    for found in measurements:
        if found.group == "growth":
            costs = {
                tokens: [seconds / tokens * 1e9 for seconds in found.seconds[name]]
                for tokens in GROWTH
                if (name := growth_name(tokens)) in found.seconds
            }
            cheapest = min(costs.values(), key=lambda each: spread(each).median)
            for tokens, each in costs.items():
                cost, share = spread(each), ratio(each, cheapest).median
                shown = f"{cost.median:.1f} [{cost.low:.1f}-{cost.high:.1f}]"
                lines.append([f"{tokens:,}", found.ids, shown, f"{share:.2f}x"])
            lines += [[name, found.ids, reason, "-"] for name, reason in found.absent.items()]
    return ["growth: float32 sum, width 384, one thread, out=", *in_columns(lines)]


def anatomy_table(measurements: Sequence[Measurement]) -> list[str]:
    """Where the time of one token goes."""
    found = [each for each in measurements if each.group == "anatomy"]
    title = "anatomy: one token, one thread (not measured)"
    for each in found:
        title = f"anatomy: one token of width {each.point.width}, one thread"
        return [title, *anatomy_markdown(each.seconds)]
    return [title]


def figure_table(figures: Sequence[Figure]) -> list[str]:
    """What was measured of whole processes."""
    lines = []
    for figure in figures:
        value = "not measured" if figure.value is None else amount(figure.value, figure.unit)
        if len(figure.samples) > 1:
            low, high = spread(figure.samples)[1:]
            value += f" [{low:.3g}-{high:.3g}]"
        lines.append(f"  {figure.name}: {value}: {figure.note}")
    return ["whole processes", *lines]


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Each miss by name, what could not be held against its target, and how many were reached."""
    missed = [verdict for verdict in verdicts if verdict.missed]
    blank = [verdict for verdict in verdicts if not verdict.measured]
    reached = len(verdicts) - len(missed) - len(blank)
    return [
        *(f"MISSED {verdict}" for verdict in missed),
        *(f"NOT MEASURED {verdict}" for verdict in blank),
        f"{reached} figures reach their target, {len(missed)} miss it, {len(blank)} were not "
        "measured",
    ]


def page_fault_table(measurements: Sequence[Measurement]) -> list[str]:
    """Where memory goes back to the system after a call and is fetched again in the next."""
    lines = [["group", "(B, S, H)", "page faults per call"]]
    lines += [
        [found.group, f"{found.point} {found.ids}", ", ".join(faults)]
        for found in measurements
        if (faults := [f"{name} {n:.0f}" for name, n in found.page_faults.items() if n >= 1])
    ]
    return in_columns(lines) if len(lines) > 1 else ["no page faults"]


def error_table(measurements: Sequence[Measurement]) -> list[str]:
    """The largest error at any point of each side that may err."""
    worst: dict[str, float] = {}
    for found in measurements:
        if not found.group.startswith("layernorm"):
            continue
        far = ", rows of mean 10 and deviation 0.01" if found.group == "layernorm-far" else ""
        for name, error in found.errors.items():
            worst[name + far] = max(error, worst.get(name + far, 0.0))
    return [
        "largest error of LayerNorm at any point, against float64, of its row's largest element",
        *(f"  {name}: {error:.2e}" for name, error in worst.items() if error),
    ]


def expressions_text(expressions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Every statement that was timed, and under which terms."""
    lines = ["what was timed (t, g: int64 ids; T, P, G: token, position and segment table)"]
    for group, statements in expressions.items():
        lines.append(f"  {group}")
        lines += [f"    {name}: {statement}" for name, statement in statements.items()]
    return lines + [f"  {name}: {note}" for name, note in NOTES.items()]


def facts_text(title: str, facts: Mapping[str, Any]) -> list[str]:
    """One fact a line."""
    return [title, *(f"  {name}: {value}" for name, value in facts.items())]


def as_text(
    about: Mapping[str, Any],
    measurements: Sequence[Measurement],
    figures: Sequence[Figure],
) -> str:
    """Everything that the command prints, but for the verdicts."""
    settings = about["settings"]
    blocks = [
        facts_text("machine", about["machine"]),
        facts_text("versions", about["versions"]),
        facts_text("settings", settings),
        expressions_text(about["expressions"]),
        [
            "ratios: times of the same round, divided as each title says: median [quartiles] of "
            f"{settings['rounds']} rounds; LOSS: the peer is faster",
            *(["--quick: a smoke test, these figures are void"] if settings["quick"] else []),
        ],
        *(row_table(row, measurements) for row in ROWS if not row.one_token),
        one_token_table(measurements),
        growth_table(measurements),
        anatomy_table(measurements),
        figure_table(figures),
        page_fault_table(measurements),
        error_table(measurements),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def as_json(
    about: Mapping[str, Any],
    measurements: Sequence[Measurement],
    figures: Sequence[Figure],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    """The same figures, and every sample they come from."""
    ratios = [
        {
            "row": row.title,
            "peer": peer,
            "reads": "bertinput / peer" if row.cost else "peer / bertinput",
            "point": found.point,
            "ids": found.ids,
            "ratio": found.ratio._asdict(),
            "bertinput_seconds": spread(found.ours)._asdict(),
            "peer_seconds": spread(found.theirs)._asdict(),
        }
        for row in ROWS
        for peer in row.peers
        for found in row.comparisons(peer, measurements)
    ]
    return {
        **about,
        "ratios": ratios,
        "figures": [dataclasses.asdict(figure) for figure in figures],
        "targets": [
            dataclasses.asdict(verdict) | {"missed": verdict.missed} for verdict in verdicts
        ],
        "samples": [dataclasses.asdict(found) for found in measurements],
    }
