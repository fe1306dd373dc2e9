"""floor.c, compiled by this machine's C compiler when it is needed."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["NoFloor", "compiled_floor"]

SOURCE = Path(__file__).with_name("floor.c")
FLAGS = ("-O3", "-shared", "-fPIC")


class NoFloor(Exception):
    """There is no C compiler, or it failed; the message says which."""


@cache
def compiled_floor() -> Callable[..., Any]:
    """``copy_rows(table, token_ids, tokens, row_bytes, out, calls)``, pointers as integers."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Path(folder, "floor.so")
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NoFloor(f"the C compiler {compiler[0]} does not run: {error.strerror}") from error
        if done.returncode:
            raise NoFloor(f"{shlex.join(command)} failed: {done.stderr.strip()[:200]}")
        copy_rows = ctypes.CDLL(str(library)).copy_rows  # stays loaded when the file is gone
    address, count = ctypes.c_void_p, ctypes.c_int64
    copy_rows.argtypes = [address, address, count, ctypes.c_size_t, address, count]
    copy_rows.restype = None
    return copy_rows
