"""What was built, how it is loaded, and how an instruction set is forced."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import bertinput
from bertinput import _core, build_info


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_build_info_says_what_was_built() -> None:
    info = build_info()
    assert info["version"] == bertinput.__version__
    assert info["numpy"] == np.__version__
    assert info["instruction_sets"][0] == "baseline"
    assert info["instruction_set"] in info["instruction_sets"]
    assert info["openmp"] is None or info["openmp"] >= 199810
    assert info["compiler"] and info["cython"].count(".") == 2
    assert (info["wait_policy"] is None) == (info["openmp"] is None)
    info["version"] = "changed"
    assert build_info()["version"] == bertinput.__version__


@pytest.mark.parametrize("name", _core.instruction_sets())
def test_an_instruction_set_can_be_named(name: str) -> None:
    code = "import bertinput; print(bertinput.build_info()['instruction_set'])"
    assert python(code, BERTINPUT_ISA=name).stdout.strip() == name


def test_an_empty_name_names_none() -> None:
    code = "import bertinput; print(bertinput.build_info()['instruction_set'])"
    assert python(code, BERTINPUT_ISA="").stdout.strip() == _core.instruction_sets()[-1]


def test_an_unknown_instruction_set_is_refused() -> None:
    done = python("import bertinput", BERTINPUT_ISA="sse9")
    assert done.returncode != 0
    assert "BERTINPUT_ISA='sse9'" in done.stderr
    assert "baseline" in done.stderr


POLICY = "import bertinput; print(bertinput.build_info()['wait_policy'])"
libgomp = pytest.mark.skipif(
    build_info()["openmp"] is None
    or sys.platform != "linux"
    or not build_info()["compiler"].startswith("GCC"),
    reason="about GCC's OpenMP runtime",
)


@libgomp
def test_idle_threads_sleep() -> None:
    """The runtime itself says with which policy it was started."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", POLICY],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "passive"
    told = done.stderr.replace("[host] ", "")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told
    assert "GOMP_SPINCOUNT = '0'" in told


@libgomp
def test_the_users_own_policy_stands() -> None:
    assert python(POLICY, OMP_WAIT_POLICY="ACTIVE").stdout.strip() == "active"


@libgomp
def test_a_runtime_that_was_there_before_is_said() -> None:
    code = f"import ctypes, os; ctypes.CDLL('libgomp.so.1'); {POLICY}"
    done = python(f"import os; os.environ.pop('OMP_WAIT_POLICY', None); {code}")
    if "OSError" in done.stderr:
        pytest.skip("the runtime has a private name here, so nobody else can have loaded it")
    assert "the library that loaded the runtime first" in done.stdout
