"""Memory of results, kept to be used again.

A new result of a megabyte and more costs more in pages that the system maps, clears and unmaps
than the sum that fills it. So results of 1 MiB and more, unless ``out=`` is given, take their
memory from a pool, and give it back when the last array that refers to it is gone. The pool is
one for the process, safe with threads and `fork`, and holds no more than its limit:

- `limit` and `set_limit`: the most that it may hold while nobody uses it, 256 MiB at first;
- `held`: what it holds now;
- `trim`: give all of that back to the system.
"""

from __future__ import annotations

import numpy as np

import bertinput._build  # noqa: F401  loads the core with the right OpenMP policy
from bertinput import _core

__all__ = ["held", "limit", "set_limit", "trim"]


def limit() -> int:
    """The most bytes that the pool may hold."""
    return _core.pool_limit()


def set_limit(nbytes: int) -> None:
    """Set the most bytes that the pool may hold; 0 turns it off.

    What it holds beyond that goes back to the system at once. Results that are in use do not
    count: theirs is the caller's memory.

    Parameters
    ----------
    nbytes : int

    Raises
    ------
    TypeError, ValueError
        `nbytes` is not an integer, or is negative.
    """
    if isinstance(nbytes, bool | np.bool_) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"nbytes must be an integer, not {type(nbytes).__name__}")
    number = int(nbytes.__index__())
    if number < 0:
        raise ValueError(f"nbytes must not be negative, and is {number}")
    number = min(number, _core.POOL_MOST)
    _core.pool_set_limit(number)


def held() -> int:
    """The bytes that the pool holds now, for results to come."""
    return _core.pool_held()


def trim() -> int:
    """Give all memory that the pool holds back to the system, and return how many bytes went."""
    return _core.pool_trim()
