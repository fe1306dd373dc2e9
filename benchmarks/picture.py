"""One picture: how many times longer each peer takes against the size of the result, and growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.groups import growth_name
from benchmarks.machine import Caches
from benchmarks.markdown import taken_on
from benchmarks.rows import FLOOR, LAYER, LAYERNORM, SEED, Comparison, Measurement, Row
from benchmarks.targets import GROWTH_LIMIT, growth_points
from benchmarks.timing import spread
from benchmarks.workload import GROWTH

__all__ = ["draw"]

# Told apart by those who see colours differently, too (Okabe and Ito), and by their marks.
STYLES = {
    "NumPy": ("#0072b2", "o"),
    "NumPy, fresh": ("#56b4e9", "v"),
    "PyTorch": ("#d55e00", "s"),
    "ONNX Runtime": ("#009e73", "D"),
    "C floor": ("#444444", "x"),
}
NAMES = {"C floor": "C floor (memcpy)"}
LINES = {"uniform": "-", "zipf": (0, (4, 2))}
GROWTH_COLOURS = {"uniform": "#0072b2", "zipf": "#cc79a7"}
LOSS = "#d62728"
PANELS: tuple[tuple[str, Sequence[tuple[Row, str]], int], ...] = (
    (
        "float32 sum, out given",
        [(LAYER, peer) for peer in ("NumPy", "NumPy, fresh", "PyTorch", "ONNX Runtime")]
        + [(FLOOR, "C floor")],
        4,
    ),
    (
        "float64 call, new result",
        [(SEED, peer) for peer in ("NumPy", "NumPy, fresh", "PyTorch", "ONNX Runtime")],
        8,
    ),
    (
        "float32 sum + LayerNorm, out given",
        [(LAYERNORM, "PyTorch"), (LAYERNORM, "ONNX Runtime")],
        4,
    ),
)
SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "bertinput",  # the same figures, the same file
}


def size(value: float, _: object = None) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


def plain(value: float, _: object = None) -> str:
    """A number on a logarithmic axis."""
    return f"{value:,.10g}"


def peer_over_ours(found: Comparison) -> tuple[float, float, float]:
    """How many times longer the peer took, with its quartiles, also of a row that is a cost."""
    value = found.ratio
    if found.cost:
        return 1 / value.median, 1 / value.high, 1 / value.low
    return value.median, value.low, value.high


def not_measured(axes: Axes) -> None:
    """Say so instead of leaving axes without a line."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#444444")


def draw_ratios(
    axes: Axes,
    title: str,
    lines: Sequence[tuple[Row, str]],
    element_bytes: int,
    measurements: Sequence[Measurement],
) -> None:
    """The ratio to each peer against the size of the result."""
    axes.set_title(title, loc="left")
    if not any(row.comparisons(peer, measurements) for row, peer in lines):
        not_measured(axes)
        return
    lowest, highest = 0.7, 1.2
    for row, peer in lines:
        colour, mark = STYLES[peer]
        compared = row.comparisons(peer, measurements)
        for kind, dashes in LINES.items():
            found = sorted(
                (each.point.tokens * each.point.width * element_bytes, *peer_over_ours(each))
                for each in compared
                if each.ids == kind
            )
            if not found:
                continue
            sizes, middle, low, high = zip(*found, strict=True)
            main = kind == "uniform"
            axes.plot(
                sizes,
                middle,
                color=colour,
                linestyle=dashes,
                marker=mark,
                markersize=4 if main else 2.5,
                linewidth=1.6 if main else 1,
                alpha=1 if main else 0.65,
                label=NAMES.get(peer, peer) if main else None,
            )
            axes.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
            lowest, highest = min(lowest, *low), max(highest, *high)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(lowest * 0.8, highest * (highest / lowest) ** 0.3)  # room for the legend
    axes.axhspan(lowest * 0.8, 1, color=LOSS, alpha=0.12, linewidth=0)
    axes.axhline(1, color=LOSS, linewidth=1.2)
    axes.annotate(
        "below the line the peer is faster",
        (0.99, 0.02),
        xycoords="axes fraction",
        ha="right",
        color=LOSS,
        fontsize=8,
    )
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_major_formatter(FuncFormatter(size))
    marks = (1, 2, 3, 5) if highest < 12 * lowest else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=marks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size of the result")
    axes.set_ylabel("peer's time / ours")
    axes.legend(loc="upper left", ncols=3, columnspacing=1, handlelength=1.6)


def draw_growth(axes: Axes, measurements: Sequence[Measurement], caches: Caches) -> None:
    """Nanoseconds for each token against the number of tokens."""
    measurements = [found for found in measurements if found.group == "growth"]
    axes.set_title("Growth: float32 sum, out given", loc="left")
    if not measurements:
        not_measured(axes)
        return
    width = measurements[0].point.width
    for found in measurements:
        colour = GROWTH_COLOURS[found.ids]
        cost = {
            tokens: spread([1e9 * seconds / tokens for seconds in found.seconds[name]])
            for tokens in GROWTH
            if (name := growth_name(tokens)) in found.seconds
        }
        axes.plot(
            list(cost),
            [each.median for each in cost.values()],
            color=colour,
            linestyle=LINES[found.ids],
            marker="o",
            markersize=4,
            linewidth=1.6,
            label=f"{found.ids} ids",
        )
        low, high = [each.low for each in cost.values()], [each.high for each in cost.values()]
        axes.fill_between(list(cost), low, high, color=colour, alpha=0.12, linewidth=0)
        held = growth_points(found, caches)
        if held:
            cheapest = min(cost[tokens].median for tokens in held)
            axes.fill_between(
                [held[0] / 2, held[-1] * 2],
                cheapest,
                GROWTH_LIMIT * cheapest,
                facecolor="none",
                edgecolor=colour,
                linestyle=LINES[found.ids],
                linewidth=0.8,
                label=f"{GROWTH_LIMIT:g} times, out of cache",
            )
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] * 0.6)  # room for the words at the edge of the cache
    if caches.last:
        edge = caches.last / (4 * width)
        axes.axvline(edge, color="#444444", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"result = last-level\ncache, {size(caches.last)}",
            (edge, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color="#444444",
        )
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ns"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"tokens of a call, width {width}")
    axes.set_ylabel("time for each token")
    axes.legend(loc="upper right")


def draw(
    file: Path, about: Mapping[str, Any], measurements: Sequence[Measurement], caches: Caches
) -> None:
    """Write the picture as .svg or .png, by the file's ending."""
    with mpl.rc_context(SETTINGS):
        canvas = Canvas(figsize=(9, 7.2), layout="constrained")
        ratios = canvas.subplots(2, 2)
        for axes, (title, lines, element_bytes) in zip(ratios.flat, PANELS, strict=False):
            draw_ratios(axes, title, lines, element_bytes, measurements)
        draw_growth(ratios.flat[-1], measurements, caches)
        void = "VOID, a smoke test. " if about["settings"]["quick"] else ""
        canvas.suptitle(
            f"{void}How many times longer than bertinput each peer takes, on one thread",
            fontsize=11,
        )
        canvas.supxlabel(
            taken_on(about).replace(", Python", ",\nPython")
            + " Solid: uniform ids, dashed: Zipf-like; bands: quartiles.",
            fontsize=7.5,
            color="#444444",
        )
        metadata = {"Date": None} if file.suffix == ".svg" else {}
        canvas.savefig(file, dpi=100, metadata=metadata)
