"""How the core is built: the flags for each compiler, and the refusals in plain words."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")

SETUP = Path(__file__).parents[1] / "setup.py"
PLATFORMS = [("unix", "linux"), ("unix", "darwin"), ("msvc", "win32"), ("mingw32", "win32")]


@pytest.fixture
def build() -> ModuleType:
    """The module `setup.py`, which builds nothing when it is imported."""
    spec = importlib.util.spec_from_file_location("bertinput_setup", SETUP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Compiler:
    """Notes what it is given, and fails where it is given `refused`."""

    def __init__(self, compiler_type: str, refused: str = "") -> None:
        self.compiler_type = compiler_type
        self.refused = refused
        self.compiled: list[list[str]] = []
        self.linked: list[list[str]] = []

    def compile(self, sources: list[str], *, output_dir: str, extra_postargs: list[str]) -> Any:
        (source,) = sources
        assert "main" in Path(source).read_text()
        self.compiled.append(extra_postargs)
        self.refuse([*extra_postargs, "any compilation"])
        return [str(Path(output_dir, "probe.o"))]

    def link_shared_object(
        self, objects: list[str], name: str, *, extra_postargs: list[str]
    ) -> None:
        assert objects == [str(Path(name).with_suffix(".o"))]
        self.linked.append(extra_postargs)
        self.refuse([*extra_postargs, "any link"])

    def refuse(self, given: list[str]) -> None:
        if self.refused in given:
            raise setuptools.errors.CompileError(f"cannot do {self.refused}")


def build_with(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, compiler: Compiler, system: str = "linux"
) -> Any:
    """Run the build command as far as the compilation, and return the extension."""
    extension = setuptools.Extension("bertinput._core", ["src/bertinput/_core.pyx"])
    command = build.BuildCore(setuptools.Distribution())
    command.compiler, command.extensions = compiler, [extension]
    monkeypatch.setattr(build.sys, "platform", system)
    monkeypatch.setattr(build.build_ext, "build_extensions", lambda command: None)
    command.build_extensions()
    return extension


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "i686"])
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_gcc_and_clang_may_not_change_a_rounding(
    build: ModuleType, system: str, machine: str
) -> None:
    flags, links = build.flags_for("unix", system, machine)
    assert "-ffp-contract=off" in flags
    assert {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"}.isdisjoint(flags)
    assert not [flag for flag in flags if flag.startswith("-march")]
    assert ("-mfpmath=sse" in flags) == ("-msse2" in flags) == (machine == "i686")
    assert ("-lm" in links) == (system == "linux")
    for given in (flags, links):  # after what CFLAGS may have said
        assert "-fno-fast-math" in given or system != "linux"


def test_msvc_may_not_change_a_rounding(build: ModuleType) -> None:
    flags, links = build.flags_for("msvc", "win32", "AMD64")
    assert "/fp:precise" in flags
    assert [flag for flag in flags if not flag.startswith("/")] == []
    assert links == []


@pytest.mark.parametrize(("kind", "system"), PLATFORMS)
def test_a_build_uses_the_openmp_that_it_has_tried(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, system: str
) -> None:
    monkeypatch.setattr(build, "NO_OPENMP", False)
    compiler = Compiler(kind)
    extension = build_with(build, monkeypatch, compiler, system)
    openmp, openmp_links = build.openmp_flags_for(kind, system)
    assert "openmp" in openmp[-1]
    assert compiler.compiled == [[], openmp]
    assert compiler.linked == [[], openmp_links]
    flags, links = build.flags_for(kind, system, build.platform.machine())
    assert extension.extra_compile_args == flags + openmp
    assert extension.extra_link_args == links + openmp_links


@pytest.mark.parametrize(("kind", "system"), PLATFORMS)
def test_a_build_without_openmp_does_not_ask_for_it(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, system: str
) -> None:
    monkeypatch.setattr(build, "NO_OPENMP", True)
    compiler = Compiler(kind, refused=build.openmp_flags_for(kind, system)[0][-1])
    extension = build_with(build, monkeypatch, compiler, system)
    assert "openmp" not in " ".join(extension.extra_compile_args + extension.extra_link_args)


@pytest.mark.parametrize("refused", ["any compilation", "any link"])
@pytest.mark.parametrize("no_openmp", [False, True])
def test_without_a_compiler_the_build_says_which_to_install(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, refused: str, no_openmp: bool
) -> None:
    monkeypatch.setattr(build, "NO_OPENMP", no_openmp)
    with pytest.raises(setuptools.errors.PlatformError) as refusal:
        build_with(build, monkeypatch, Compiler("unix", refused))
    assert "no working C compiler" in str(refusal.value)
    assert "apt-get install gcc" in str(refusal.value)
    assert f"cannot do {refused}" in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "system", "refused"),
    [
        ("unix", "linux", "-fopenmp"),
        ("unix", "darwin", "-fopenmp"),
        ("unix", "darwin", "-lomp"),
        ("msvc", "win32", "/openmp"),
    ],
)
def test_without_openmp_the_build_says_how_to_do_without(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, system: str, refused: str
) -> None:
    monkeypatch.setattr(build, "NO_OPENMP", False)
    with pytest.raises(setuptools.errors.PlatformError) as refusal:
        build_with(build, monkeypatch, Compiler(kind, refused), system)
    assert "BERTINPUT_NO_OPENMP=1" in str(refusal.value)
    assert f"cannot do {refused}" in str(refusal.value)


@pytest.mark.parametrize(("value", "without"), [("", False), ("0", False), ("1", True)])
def test_the_environment_decides_on_openmp(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, value: str, without: bool
) -> None:
    monkeypatch.setenv("BERTINPUT_NO_OPENMP", value)
    assert request.getfixturevalue("build").NO_OPENMP is without


def run_setup(folder: Path, **environment: str) -> str:
    """Run `setup.py build_ext` by itself in a folder; it must fail, and what it says counts."""
    shutil.copy(SETUP, folder)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=folder,
        env=os.environ | {"BERTINPUT_NO_OPENMP": ""} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


unix = pytest.mark.skipif(os.name != "posix", reason="CC names the compiler on Unix only")


@unix
def test_a_compiler_that_is_not_there_is_refused(tmp_path: Path) -> None:
    said = run_setup(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert "no working C compiler" in said
    assert "no-such-compiler" in said


@unix
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
def test_a_compiler_that_does_not_know_openmp_is_refused(tmp_path: Path) -> None:
    compiler = tmp_path / "cc-without-openmp"
    compiler.write_text('#!/bin/sh\ncase " $* " in *openmp*) exit 1 ;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    said = run_setup(tmp_path, CC=str(compiler))
    assert "not with OpenMP" in said
    assert "BERTINPUT_NO_OPENMP=1" in said
