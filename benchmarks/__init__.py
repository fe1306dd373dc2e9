"""How fast the package is beside NumPy, PyTorch, ONNX Runtime and memcpy: ``python -m benchmarks``.

workload.py    the grid, the tables, the ids
sides.py       who is timed: each side is one statement, which is both printed and run
floor.c, .py   the C floor, and its compilation
checkpoint.py  a safetensors file whose tables are mapped
groups.py      which sides take turns, and at which points
anatomy.py     one group of its own: where the time of one token goes
timing.py      alternating rounds of calibrated samples
measure.py     all groups, each at each point in a process of its own
processes.py   what only a whole process shows: CPU burnt, import, wheel, loading, memory
rows.py        what is compared with what
targets.py     what each comparison has to reach, and whether it does
report.py      the tables on the screen and the JSON file
markdown.py    the tables of the README
picture.py     ratio against size
machine.py     where the figures were taken
"""
