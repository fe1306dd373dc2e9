"""Tables out of checkpoints as people have them: safetensors files and ONNX files.

Only the tensors of the input stage are read. In a safetensors file, and in the external data of
an ONNX file, they are mapped and not copied: processes that load the same file share its pages.
What a file claims is checked against its size before it is used, and no code in it is ever run.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
import re
import warnings
from collections.abc import Iterable
from mmap import ACCESS_READ
from mmap import mmap as MemoryMap
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bertinput.families import Family, family_named
from bertinput.tables import BFloat16Table, QuantizedTable

__all__ = ["Checkpoint", "Fingerprint", "fingerprint", "read_checkpoint"]

Table: TypeAlias = NDArray[Any] | QuantizedTable | BFloat16Table


class Checkpoint(NamedTuple):
    """The input stage of a model; all arrays are read-only.

    Attributes
    ----------
    family : Family
        The row of the family table that says how to use the rest.
    token_embeddings, position_embeddings, segment_embeddings : table
        An array, a QuantizedTable or a BFloat16Table, each of shape (N, H); None where the
        family has no such table.
    layer_norm : tuple or None
        ``(weight, bias, eps)``, weight and bias of shape (H,).
    """

    family: Family
    token_embeddings: Table
    position_embeddings: Table | None
    segment_embeddings: Table | None
    layer_norm: tuple[NDArray[Any], NDArray[Any] | None, float] | None


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    family: str | None = None,
    eps: float | None = None,
    mmap: bool = True,
) -> Checkpoint:
    """Read the embedding tables and the LayerNorm of a model.

    Parameters
    ----------
    path : str or path-like
        A directory with ``config.json`` and ``model.safetensors``; or a file: ``.onnx``, or
        safetensors under any other name.
    family : str, optional
        The model's family. If not given: ``family`` in the metadata of a safetensors file, else
        ``model_type`` in the ``config.json`` beside the file.
    eps : float, optional
        LayerNorm's epsilon. If not given: ``eps`` in the metadata of a safetensors file or the
        attribute of the LayerNormalization node in an ONNX file, else what ``config.json`` says.
        The family's default stands in for a key that ``config.json`` lacks, and for a node that
        an ONNX file without ``config.json`` lacks.
    mmap : bool, default True
        Map the tables of a safetensors file, and of an ONNX file's external data. False reads
        them into memory, for files that will be changed in place.

    Returns
    -------
    Checkpoint

    Raises
    ------
    FileNotFoundError
        If the path is not there, or the directory holds no ``model.safetensors``.
    ValueError
        If a file is malformed or lacks a tensor, if shapes disagree, or if the family or the
        epsilon stays unknown. The message names the file and the tensor, or the argument.
    ImportError
        If an ONNX file is given and ``onnx`` is not installed.

    Warns
    -----
    UserWarning
        If ``config.json`` and a table disagree about the number of rows. The table decides.
    """
    file = _file_at(Path(path))
    config = _Config(file.parent / "config.json")
    with open(file, "rb") as stream:
        source: _Safetensors | _Onnx
        if file.suffix.lower() == ".onnx":
            source = _Onnx(file, stream, mmap)
        else:
            source = _Safetensors(file, stream, mmap)
        row = _family_of(source, config, family)
        prefix = _prefix_in(source, row)

        names = [row.token, row.position, row.segment]
        found = [None if name is None else _find(source, prefix + name) for name in names]
        tables = [None if name is None else _read(source, name, ndim=2) for name in found]
        token, position, segment = tables
        assert token is not None  # a family has token embeddings at least
        width = token.shape[1]
        _check_sizes(file, found, tables, row, config)

        layer_norm = None
        if row.layer_norm is not None:
            name = prefix + row.layer_norm
            weight = _find(source, f"{name}.weight", f"{name}.gamma")
            bias = _find(source, f"{name}.bias", f"{name}.beta")
            layer_norm = (
                _vector(source, weight, width),
                _vector(source, bias, width),
                _eps_of(source, config, row, weight, eps),
            )
    return Checkpoint(row, token, position, segment, layer_norm)


def _file_at(path: Path) -> Path:
    """The file to read: `path` itself, or the model in that directory."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or directory (a path is wanted; nothing is downloaded)"
        )
    file = path / "model.safetensors" if path.is_dir() else path
    if file.exists():
        if not file.is_file():
            raise ValueError(f"{file} is not a regular file")
        return file
    there = sorted(entry.name for entry in path.iterdir())
    pickled = [name for name in there if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    advice = f"; convert {pickled[0]} to safetensors: pickles are not read" if pickled else ""
    raise FileNotFoundError(
        f"{path} holds no model.safetensors, but: {_listed(there) or 'nothing'}{advice}"
    )


class _Config:
    """``config.json``, where there is one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.exists = file.is_file()
        self.values = _json_object(file.read_bytes(), str(file)) if self.exists else {}
        kind = self.values.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise ValueError(
                f"{file}: position_embedding_type must be 'absolute', not {short(kind)}"
            )

    def size(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and type(value) is not int:
            raise ValueError(f"{self.file}: {key} must be an integer, not {short(value)}")
        return value


def _json_object(data: bytes, what: str, *, strict: bool = False) -> dict[str, Any]:
    """Decode a JSON object; a strict one has neither a key twice nor NaN or Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {short(twice)} stands twice")
        return keys

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    hooks: dict[str, Any] = {"object_pairs_hook": unique, "parse_constant": refuse}
    try:
        value = json.loads(data.decode("utf-8"), **(hooks if strict else {}))
    except RecursionError:
        raise ValueError(f"{what} is malformed: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is malformed: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is malformed: a JSON object is wanted, not {short(value)}")
    return value


def _family_of(
    source: _Safetensors | _Onnx, config: _Config, argument: str | None
) -> Family:
    """The family that the argument, the file's metadata or the configuration names."""
    if argument is not None:
        return family_named(argument)
    if "family" in source.metadata:
        where, name = f"{source.file}: metadata", source.metadata["family"]
    elif "model_type" in config.values:
        where, name = str(config.file), config.values["model_type"]
    else:
        lacking = "has no model_type" if config.exists else "is not there"
        raise ValueError(
            f"{source.file}: the model's family is unknown, as {config.file} {lacking}; "
            "pass the argument family="
        )
    try:
        return family_named(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _eps_of(
    source: _Safetensors | _Onnx,
    config: _Config,
    row: Family,
    weight: str,
    argument: float | None,
) -> float:
    """LayerNorm's epsilon, from the first of the places that know it."""
    value: object
    if argument is not None:
        where, value = "eps", argument
    elif (said := source.eps(weight)) is not None:
        where, value = f"{source.file}: eps", said
    elif config.exists or isinstance(source, _Onnx):
        where = f"{config.file}: {row.eps_key}"
        value = config.values.get(row.eps_key, row.eps_default)
    else:
        raise ValueError(
            f"{source.file}: LayerNorm's epsilon is unknown, as {config.file} is not there; "
            "pass the argument eps="
        )
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        # An int beyond the range of float compares, but does not convert.
        if 0 <= value <= np.finfo(np.float64).max:
            return float(value)
    raise ValueError(f"{where} must be a finite number >= 0, not {short(value)}")
