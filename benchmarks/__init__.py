"""How fast the package is beside NumPy, PyTorch and ONNX Runtime: ``python -m benchmarks``.

workload.py   the grid, the tables, the ids
sides.py      who is timed: each side is one statement, which is both printed and run
timing.py     alternating rounds of calibrated samples
measure.py    all of it, each group of sides at each point in a process of its own
rows.py       what is compared with what, the targets, and which are missed
report.py     the tables and the JSON file
machine.py    where the figures were taken
"""
