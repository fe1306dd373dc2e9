"""Load the compiled core with an OpenMP runtime that does not spin, and say what was built."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

__all__ = ["build_info"]

# OpenMP runtimes let idle threads spin for milliseconds unless this variable says otherwise when
# the runtime starts. A service would burn a core.
_POLICY = "OMP_WAIT_POLICY"


def _runtime_loaded() -> bool:
    """Whether another library has already brought an OpenMP runtime into this process."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            found = maps.read()
    except OSError:
        return False
    return any(name in found for name in (b"/libgomp", b"/libomp", b"/libiomp"))


def _load_core() -> str:
    """Import the core; return who decided how idle threads wait."""
    if "bertinput._core" in sys.modules or _POLICY in os.environ:
        import bertinput._core

        return os.environ.get(_POLICY, "passive").lower()
    loaded_before = sys.platform == "linux" and _runtime_loaded()
    os.environ[_POLICY] = "passive"
    try:
        import bertinput._core  # noqa: F401
    finally:
        del os.environ[_POLICY]
    return "decided by the library that loaded the runtime first" if loaded_before else "passive"


_wait_policy = _load_core()


def build_info() -> dict[str, Any]:
    """Say what was built, and what runs here.

    Returns
    -------
    dict
        ``version``; ``openmp``, the date of the OpenMP specification (None: built without it, on
        one thread); ``wait_policy``, how idle OpenMP threads wait (``"passive"``: they sleep);
        ``instruction_sets`` that were built, and the ``instruction_set`` chosen for this CPU
        (``BERTINPUT_ISA`` in the environment, read once at import, names another);
        ``compiler``, ``cython`` and ``numpy`` versions.
    """
    from bertinput import __version__, _core

    facts = _core.build_facts()
    return {
        "version": __version__,
        "openmp": facts.pop("openmp"),
        "wait_policy": _wait_policy if _core.build_facts()["openmp"] else None,
        **facts,
        "numpy": np.__version__,
    }
