"""The tables on the screen and the JSON file."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rows import ROWS, Measurement, Row
from benchmarks.sides import NOTES
from benchmarks.timing import Spread, ratio, spread

__all__ = ["as_json", "as_text"]


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds:.2f} s"


def times(value: Spread) -> str:
    """A ratio with its quartiles; a loss is marked."""
    mark = "LOSS " if value.median < 1 else ""
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
    ours = {
        (found.point, found.ids): spread(found.seconds[row.ours]).median
        for found in reversed(measurements)  # of several groups the first
        if found.group in row.peers.values()
    }
    lines = [["(B, S, H)", "ids", "bertinput"]]
    lines += [[str(point), ids, duration(ours[point, ids])] for point, ids in reversed(ours)]
    lines.append(["geometric mean", "", ""])
    absent = []
    for peer in row.peers:
        ratios = [found.ratio for found in row.comparisons(peer, measurements)]
        if not ratios:
            absent.append(peer)
            continue
        mean = statistics.geometric_mean(value.median for value in ratios)
        column = [peer, *map(times, ratios), f"{mean:.2f}x"]
        for line, cell in zip(lines, column, strict=True):
            line.append(cell)
    note = [f"(not installed: {', '.join(absent)})"] if absent else []
    return [row.title, *note, *in_columns(lines)]


def one_token_table(measurements: Sequence[Measurement]) -> list[str]:
    """What a call costs when there is next to nothing to compute."""
    lines = [["call", "ids", "bertinput", "NumPy", "bertinput / NumPy"]]
    for row in ROWS:
        for found in row.comparisons("NumPy", measurements) if "NumPy" in row.peers else ():
            if found.point.tokens == 1:
                share = ratio(found.ours, found.theirs)
                lines.append(
                    [
                        row.title,
                        found.ids,
                        duration(spread(found.ours).median),
                        duration(spread(found.theirs).median),
                        f"{share.median:.2f} [{share.low:.2f}-{share.high:.2f}]",
                    ]
                )
    return ["one token", *in_columns(lines)]


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
        for name, error in found.errors.items():
            worst[name] = max(error, worst.get(name, 0.0))
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


def as_text(about: Mapping[str, Any], measurements: Sequence[Measurement]) -> str:
    """Everything that the command prints."""
    settings = about["settings"]
    blocks = [
        facts_text("machine", about["machine"]),
        facts_text("versions", about["versions"]),
        facts_text("settings", settings),
        expressions_text(about["expressions"]),
        [
            "ratios: a peer's time / bertinput's of the same round: median [quartiles] of "
            f"{settings['rounds']} rounds; below 1 the peer is faster: LOSS",
            *(["--quick: a smoke test, these figures are void"] if settings["quick"] else []),
        ],
        *(row_table(row, measurements) for row in ROWS),
        one_token_table(measurements),
        page_fault_table(measurements),
        error_table(measurements),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def as_json(
    about: Mapping[str, Any], measurements: Sequence[Measurement], misses: Sequence[str]
) -> dict[str, Any]:
    """The same figures, and every sample they come from."""
    figures = [
        {
            "row": row.title,
            "peer": peer,
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
    samples = [dataclasses.asdict(found) for found in measurements]
    return {**about, "figures": figures, "missed": list(misses), "samples": samples}
