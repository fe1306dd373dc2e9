"""The command: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.groups import GROUPS
from benchmarks.machine import cache_sizes, installed, load_average, machine, versions
from benchmarks.markdown import as_markdown
from benchmarks.measure import measure_all
from benchmarks.processes import PROCESSES, measure_processes
from benchmarks.report import as_json, as_text, verdict_lines
from benchmarks.sides import NOTES
from benchmarks.targets import verdicts

LEAST_ROUNDS, ROUNDS, QUICK_ROUNDS = 9, 11, 2
NAMES = (*GROUPS, *PROCESSES)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time bertinput beside NumPy, PyTorch, ONNX Runtime and memcpy.",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 and name each target that was missed"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test of the benchmark; its figures are void"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the README's tables")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the ratios: .svg or .png (matplotlib)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=NAMES,
        metavar="NAME",
        help=f"measure this alone; may be repeated: {', '.join(NAMES)}",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.check and (options.quick or options.rounds < LEAST_ROUNDS):
        parser.error(f"--check needs full sizes and at least {LEAST_ROUNDS} rounds")
    for name in ("json", "markdown", "picture"):
        file = getattr(options, name)
        if file and not file.absolute().parent.is_dir():
            parser.error(f"--{name}: there is no directory {file.parent}")
    if options.picture and installed("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    if options.picture and options.picture.suffix not in (".svg", ".png"):
        parser.error("--picture: the name must end with .svg or .png")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a target was to be checked and is missed."""
    options = arguments(argv)
    wanted = options.only or NAMES
    about: dict[str, Any] = {"machine": machine(), "versions": versions()}
    started = time.perf_counter()
    processes = [name for name in PROCESSES if name in wanted]
    figures = measure_processes(options.rounds, options.quick, processes)
    groups = [name for name in GROUPS if name in wanted]
    measurements, expressions = measure_all(options.rounds, options.quick, groups)
    about["settings"] = {
        "quick": options.quick,
        "rounds": options.rounds,
        "only": options.only,
        "seconds": round(time.perf_counter() - started, 1),
        "load_average_at_end": load_average(),
    }
    about |= {"expressions": expressions, "notes": NOTES}
    held = verdicts(measurements, figures, cache_sizes())
    print(as_text(about, measurements, figures))
    if options.json:
        content = as_json(about, measurements, figures, held)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(as_markdown(about, measurements, held))
    if options.picture:
        from benchmarks.picture import draw  # needs matplotlib, all else does without

        draw(options.picture, about, measurements, cache_sizes())
    if not options.quick:
        print()
        print("\n".join(verdict_lines(held)))
    return 1 if options.check and any(verdict.missed for verdict in held) else 0


if __name__ == "__main__":
    sys.exit(main())
