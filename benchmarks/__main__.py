"""The command: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import load_average, machine, versions
from benchmarks.measure import measure_all
from benchmarks.report import as_json, as_text
from benchmarks.rows import missed
from benchmarks.sides import NOTES

LEAST_ROUNDS = 9


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time bertinput beside NumPy, PyTorch and ONNX Runtime, on one thread.",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 and name each target that was missed"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test of the benchmark; its figures are void"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 25")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 2 if options.quick else 25
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.check and (options.quick or options.rounds < LEAST_ROUNDS):
        parser.error(f"--check needs the full grid and at least {LEAST_ROUNDS} rounds")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {options.json.parent}")
    return options


def main() -> int:
    """Measure, print, write; 1 if a target was to be checked and is missed."""
    options = arguments()
    about: dict[str, Any] = {"machine": machine(), "versions": versions()}
    started = time.perf_counter()
    measurements, expressions = measure_all(options.rounds, options.quick)
    about["settings"] = {
        "quick": options.quick,
        "rounds": options.rounds,
        "seconds": round(time.perf_counter() - started, 1),
        "load_average_at_end": load_average(),
    }
    about |= {"expressions": expressions, "notes": NOTES}
    misses = [] if options.quick else missed(measurements)
    print(as_text(about, measurements))
    if options.json:
        content = as_json(about, measurements, misses)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if not options.check:
        return 0
    print()
    for line in misses:
        print(f"MISSED {line}")
    if not misses:
        print("every target was reached")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
