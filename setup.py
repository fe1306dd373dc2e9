"""Build the compiled core. Everything else about the project stands in pyproject.toml."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError, PlatformError

NO_OPENMP = os.environ.get("BERTINPUT_NO_OPENMP", "") not in ("", "0")

NO_COMPILER = """\
bertinput is being built from source, and no working C compiler
with Python's headers was found.
  Debian, Ubuntu:  apt-get install gcc python3-dev
  Fedora, RHEL:    dnf install gcc python3-devel
  Alpine:          apk add gcc musl-dev python3-dev
  macOS:           xcode-select --install
  Windows:         the "Desktop development with C++" workload of Visual Studio Build Tools
Prebuilt wheels need no compiler: pip install --only-binary bertinput bertinput
What the compiler said: {reason}"""

NO_RUNTIME = """\
The C compiler works, but not with OpenMP (tried {flags}).
  Debian, Ubuntu:  GCC brings it; for Clang: apt-get install libomp-dev
  macOS:           brew install libomp, then set CFLAGS=-I$(brew --prefix libomp)/include
                   and LDFLAGS=-L$(brew --prefix libomp)/lib
To build for one thread, set BERTINPUT_NO_OPENMP=1.
What the compiler said: {reason}"""

PROBE = "#include <Python.h>\nint main(void) { return 0; }\n"
OPENMP_PROBE = """\
#include <omp.h>
int main(void) {
    int sum = 0;
    #pragma omp parallel for reduction(+:sum)
    for (int i = 0; i < 10; i++) sum += i;
    return omp_get_max_threads() > 0 && sum == 45 ? 0 : 1;
}
"""


def flags_for(compiler_type: str, system: str, machine: str) -> tuple[list[str], list[str]]:
    """Compile arguments without OpenMP: the same bits everywhere, loops vectorised."""
    if compiler_type == "msvc":
        return ["/O2", "/fp:precise", "/std:c11"], []
    flags = [
        "-O3",
        "-fno-fast-math",  # whatever CFLAGS say
        "-g0",  # Python's own flags ask for debug data, which would triple the wheel
        "-std=c11",
        "-ffp-contract=off",  # a fused multiply-add rounds once where NumPy rounds twice
        "-fno-math-errno",
        "-fno-trapping-math",  # lets conversions become selects; values stay the same
        "-fvisibility=hidden",
    ]
    if machine in ("i386", "i486", "i586", "i686"):
        flags += ["-msse2", "-mfpmath=sse"]  # the x87 unit rounds differently
    # the last two: linked with fast-math, GCC's start-up code flushes subnormals process-wide
    links = ["-lm", "-pthread", "-O3", "-fno-fast-math"] if system == "linux" else []
    return flags, links


def openmp_flags_for(compiler_type: str, system: str) -> tuple[list[str], list[str]]:
    """Compile and link arguments for OpenMP."""
    if compiler_type == "msvc":
        return ["/openmp"], []
    if system == "darwin":
        return ["-Xpreprocessor", "-fopenmp"], ["-lomp"]
    return ["-fopenmp"], ["-fopenmp"]


class BuildCore(build_ext):
    """Adds the flags of the compiler at hand, and refuses in plain words without one."""

    def build_extensions(self) -> None:
        kind = self.compiler.compiler_type
        flags, links = flags_for(kind, sys.platform, platform.machine())
        reason = self.attempt(PROBE, [], [])
        if reason:
            raise PlatformError(NO_COMPILER.format(reason=reason))
        if not NO_OPENMP:
            openmp, openmp_links = openmp_flags_for(kind, sys.platform)
            reason = self.attempt(OPENMP_PROBE, openmp, openmp_links)
            if reason:
                raise PlatformError(NO_RUNTIME.format(flags=" ".join(openmp), reason=reason))
            flags, links = flags + openmp, links + openmp_links
        for extension in self.extensions:
            extension.extra_compile_args = flags
            extension.extra_link_args = links
        super().build_extensions()

    def attempt(self, source: str, flags: list[str], links: list[str]) -> str:
        """Compile and link a small program; empty if that works, else why not."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "probe.c")
            path.write_text(source)
            try:
                objects = self.compiler.compile(
                    [str(path)], output_dir=folder, extra_postargs=flags
                )
                # as the extension will be linked, with all that the environment adds
                self.compiler.link_shared_object(
                    objects, str(Path(folder, "probe.so")), extra_postargs=links
                )
            except (CCompilerError, CompileError, ExecError, LinkError, OSError) as error:
                return str(error) or type(error).__name__
        return ""


if __name__ == "__main__":  # a build does run this file as the main one; the tests import it
    core = Extension(
        "bertinput._core",
        ["src/bertinput/_core.pyx"],  # setuptools hands it to Cython, once a compiler is there
        include_dirs=[np.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        depends=[
            f"src/bertinput/{name}"
            for name in ("_rows.h", "_rows_body.h", "_ids.h", "_pool.h", "_threads.h")
        ],
    )
    setup(ext_modules=[core], cmdclass={"build_ext": BuildCore})
