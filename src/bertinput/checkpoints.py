"""Tables out of checkpoints as people have them: safetensors files and ONNX files.

Only the tensors of the input stage are read. In a safetensors file, and in the external data of
an ONNX file, they are mapped and not copied: processes that load the same file share its pages.
What a file claims is checked against its size before it is used, and no code in it is ever run.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import re
import warnings
import zlib
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
Fingerprint: TypeAlias = tuple[int, int]


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

        token = _read(source, prefix + row.token, ndim=2)
        position = None if row.position is None else _read(source, prefix + row.position, ndim=2)
        segment = None if row.segment is None else _read(source, prefix + row.segment, ndim=2)
        width = token.shape[1]
        if config.size(row.width_key) not in (None, width):
            raise ValueError(
                f"{file}: tensor {prefix + row.token!r} has width {width}, but {config.file} says "
                f"{row.width_key} {config.size(row.width_key)}"
            )
        for name, table, key in (
            (row.token, token, row.token_key),
            (row.position, position, row.position_key),
            (row.segment, segment, row.segment_key),
        ):
            if name is None or table is None:
                continue
            if table.shape[1] != width:
                raise ValueError(
                    f"{file}: tensor {prefix + name!r} has width {table.shape[1]}, but "
                    f"{prefix + row.token!r} has width {width}"
                )
            if config.size(key) not in (None, table.shape[0]):
                warnings.warn(
                    f"{file}: tensor {prefix + name!r} has {table.shape[0]} rows, but "
                    f"{config.file} says {key} {config.size(key)}; the table's rows decide",
                    stacklevel=3,  # whoever called from_pretrained
                )

        layer_norm = None
        if row.layer_norm is not None:
            name = prefix + row.layer_norm
            weight_name = _find(source, f"{name}.weight", f"{name}.gamma")
            bias_name = _find(source, f"{name}.bias", f"{name}.beta")
            layer_norm = (
                _vector(source, weight_name, width),
                _vector(source, bias_name, width),
                _eps_of(source, config, row, weight_name, eps),
            )
    return Checkpoint(row, token, position, segment, layer_norm)


def fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """The size of a checkpoint's file, and the CRC-32 of its first MiB, where the header lies."""
    with open(_file_at(Path(path)), "rb") as stream:
        start = stream.read(1 << 20)
        return os.fstat(stream.fileno()).st_size, zlib.crc32(start)


def _file_at(path: Path) -> Path:
    """The file to read: `path` itself, or the model in that directory."""
    if not path.exists() and not path.is_symlink():
        raise FileNotFoundError(
            f"{path}: no such file or directory (nothing is downloaded: the path must be local)"
        )
    file = path / "model.safetensors" if path.is_dir() else path
    if file.is_symlink() and not file.exists():
        raise FileNotFoundError(f"{file} is a broken link, to {os.readlink(file)}")
    if not file.exists():
        there = sorted(entry.name for entry in path.iterdir())
        pickles = [name for name in there if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        advice = f"; pickles are not read: convert {pickles[0]} to safetensors" if pickles else ""
        raise FileNotFoundError(
            f"{path} has no model.safetensors, only {_listed(there) or 'nothing'}{advice}"
        )
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file")
    return file


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
        """A number of rows or columns; None if the configuration does not give it."""
        value = self.values.get(key)
        if value is not None and type(value) is not int:
            raise ValueError(f"{self.file}: {key} must be an integer, not {short(value)}")
        return value


def _json_object(data: bytes, what: str, *, strict: bool = False) -> dict[str, Any]:
    """Decode a JSON object; a strict one gives no key twice, and neither NaN nor infinities."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ValueError(f"{short(key)} stands there twice")
            values[key] = value
        return values

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    hooks: dict[str, Any] = {"object_pairs_hook": unique, "parse_constant": refuse}
    try:
        value = json.loads(data.decode("utf-8"), **(hooks if strict else {}))
    except RecursionError:
        raise ValueError(f"{what} is malformed: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is malformed: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is malformed: {short(value)} is not a JSON object")
    return value


def _family_of(source: _Safetensors | _Onnx, config: _Config, argument: str | None) -> Family:
    """The family that the argument, the file's metadata or the configuration names."""
    if argument is not None:
        return family_named(argument)
    if "family" in source.metadata:
        where, name = f"{source.file}: metadata", source.metadata["family"]
    elif "model_type" in config.values:
        where, name = f"{config.file}: model_type", config.values["model_type"]
    else:
        lack = "has no model_type" if config.exists else "is not there"
        raise ValueError(f"{source.file}: give the argument family=, as {config.file} {lack}")
    try:
        return family_named(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _eps_of(
    source: _Safetensors | _Onnx,
    config: _Config,
    row: Family,
    weight_name: str,
    argument: float | None,
) -> float:
    """LayerNorm's epsilon, from the argument, the file itself or the configuration."""
    said = source.eps(weight_name)
    value: object
    if argument is not None:
        where, value = "eps", argument
    elif said is not None:
        where, value = f"{source.file}: eps", said
    elif config.exists or isinstance(source, _Onnx):
        where = f"{config.file}: {row.eps_key}"
        value = config.values.get(row.eps_key, row.eps_default)
    else:
        raise ValueError(f"{source.file}: give the argument eps=, as {config.file} is not there")
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int beyond the range of float
            number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{where} must be a finite number >= 0, not {short(value)}")
    return number


def _prefix_in(source: _Safetensors | _Onnx, row: Family) -> str:
    """What stands in front of the family's tensor names in this file."""
    if isinstance(source, _Onnx):  # an exported graph is named after whatever wrapped the model
        ends = re.compile(rf"(.*[./])?{re.escape(row.token)}", re.DOTALL)
        matches = [ends.fullmatch(name) for name in source.names]
        prefixes = [match[1] or "" for match in matches if match]
    else:
        prefixes = [prefix for prefix in row.prefixes if prefix + row.token in source.names]
    if not prefixes:
        _find(source, *(prefix + row.token for prefix in row.prefixes))
    if len(prefixes) > 1:
        both = _listed([prefix + row.token for prefix in prefixes])
        raise ValueError(f"{source.file} holds more than one model: {both}")
    return prefixes[0]


def _find(source: _Safetensors | _Onnx, *names: str) -> str:
    """The first of `names` that the file holds."""
    for name in names:
        if name in source.names:
            return name
    # Other tools keep the same tensor under the same words: "bert/embeddings/LayerNorm/gamma".
    words = names[0].split(".")[-3:-1]
    alike = [name for name in source.names if all(word in name for word in words)]
    told = f"there is {_listed(alike or source.names) or 'no tensor at all'}"
    if isinstance(source, _Safetensors) and any("/" in name for name in alike):
        told += " (a name of TensorFlow's: convert the checkpoint)"
    pickled = source.file.with_name("pytorch_model.bin")
    if pickled.exists():
        told += f"; {pickled.name} beside it is a pickle, which is not read: convert it"
    raise ValueError(f"{source.file}: tensor {' or '.join(map(repr, names))} is missing; {told}")


def _listed(names: Iterable[str]) -> str:
    several = list(names)
    more = f" and {len(several) - 5} more" if len(several) > 5 else ""
    return ", ".join(map(repr, several[:5])) + more


def _read(source: _Safetensors | _Onnx, name: str, *, ndim: int) -> Table:
    """Read a tensor that holds numbers, or quantized ones with their scale."""
    array = source.read(_find(source, name), ndim)
    if isinstance(array, QuantizedTable):
        return array
    if array.dtype == np.uint16:  # stands for bfloat16: no other uint16 is ever read
        return BFloat16Table(array)
    if array.dtype.kind != "f":
        raise ValueError(f"{source.file}: tensor {name!r} is {array.dtype} and has no scale")
    return array


def _vector(source: _Safetensors | _Onnx, name: str, width: int) -> NDArray[Any]:
    """Read LayerNorm's weight or bias."""
    vector = _read(source, name, ndim=1)
    if isinstance(vector, BFloat16Table):
        vector = (vector.bits.astype(np.uint32) << 16).view(np.float32)
        vector.flags.writeable = False
    if vector.shape != (width,) or isinstance(vector, QuantizedTable):
        raise ValueError(
            f"{source.file}: tensor {name!r} has shape {vector.shape}, but the tables have "
            f"width {width}"
        )
    return vector


def _check_shape(shape: tuple[int, ...], ndim: int) -> None:
    if len(shape) != ndim or 0 in shape:
        wanted = "(rows, width)" if ndim == 2 else "(width,)"
        raise ValueError(f"shape {shape}, where {wanted} is wanted")


def _mapped(stream: BinaryIO, mmap: bool) -> MemoryMap | BinaryIO:
    return MemoryMap(stream.fileno(), 0, access=ACCESS_READ) if mmap else stream


def _take(source: MemoryMap | BinaryIO, start: int, count: int, dtype: str) -> NDArray[Any]:
    """A read-only array of `count` items from byte `start` on, aligned or not."""
    if isinstance(source, MemoryMap):
        return np.frombuffer(source, dtype, count, start)  # keeps the map alive
    source.seek(start)
    array = np.fromfile(source, dtype, count)
    array.flags.writeable = False
    return array


# --- safetensors ---------------------------------------------------------------------------------

# The format's own limit on the header.
_LONGEST_HEADER = 100_000_000

_SAFETENSORS_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_SAFETENSORS_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

# How files begin that lie about under the name of a model.
_POSING = {
    b"PK\x03\x04": "a zip archive, such as a pickled PyTorch file or an .npz",
    b"\x80": "a pickle",
    b"\x89HDF": "an HDF5 file",
    b"version ": "a Git LFS pointer in place of the file",
    b"<": "HTML or XML",
}


def _posing(start: bytes) -> str:
    kind = next((kind for begin, kind in _POSING.items() if start.startswith(begin)), None)
    return f" (it looks like {kind})" if kind else ""


class _TensorInfo(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Safetensors:
    """A safetensors file: its header, checked as a whole, and the tensors that are asked for.

    The file is the header's length in 8 bytes, little-endian; the header, in JSON; the data, to
    which the header's offsets refer. Tensors lie in it without gap or overlap.
    """

    def __init__(self, file: Path, stream: BinaryIO, mmap: bool) -> None:
        self.file = file
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        self.begin = 8 + length
        # A real header's length may begin like a pickle, but never runs to many bytes.
        looks = _posing(first) if length >= 1 << 24 else ""
        if len(first) == 8 and not 0 < length <= _LONGEST_HEADER:
            raise ValueError(
                f"{file} is not a safetensors file{looks}: it would have a header of {length} bytes"
            )
        if size < max(8, self.begin):
            raise ValueError(
                f"{file} is cut off{looks}: it has {size} bytes, and its header ends at byte "
                f"{max(8, self.begin)}"
            )
        text = stream.read(length)
        if not text.startswith(b"{"):
            raise ValueError(f"{file}: the header does not begin with a brace{looks}")
        header = _json_object(text, f"{file}: the header", strict=True)

        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(
            isinstance(value, str) for value in self.metadata.values()
        ):
            raise ValueError(f"{file}: __metadata__ in the header must map strings to strings")
        self.names: dict[str, _TensorInfo] = {}
        for name, entry in header.items():
            try:
                self.names[name] = self._info(entry, size - self.begin)
            except ValueError as error:
                raise ValueError(f"{file}: tensor {name!r}: {error}") from None
        end = 0
        for name, info in sorted(self.names.items(), key=lambda item: item[1][2:]):
            if info.start != end:
                fault = "overlaps" if info.start < end else "leaves a gap after"
                raise ValueError(
                    f"{file}: tensor {name!r}: begins at byte {info.start} and so {fault} the "
                    f"tensor that ends at byte {end}"
                )
            end = info.stop
        if end != size - self.begin:
            raise ValueError(f"{file}: {size - self.begin - end} bytes at the end are no tensor's")
        self.data = _mapped(stream, mmap)

    @staticmethod
    def _info(entry: object, size: int) -> _TensorInfo:
        """Check a tensor's entry in the header against the size of the data."""
        if not isinstance(entry, dict):
            raise ValueError(f"{short(entry)} is not a JSON object")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in _SAFETENSORS_BITS:
            raise ValueError(f"unknown dtype {short(dtype)}")
        # The bounds are NumPy's, and keep the product below small.
        if not isinstance(shape, list) or len(shape) > 64:
            raise ValueError(f"shape {short(shape)} is not a list of at most 64 integers")
        if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise ValueError(
                f"shape {short(shape)} has an item outside the integers 0 to 2**63 - 1"
            )
        if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
            raise ValueError(f"data_offsets {short(offsets)} are not two integers")
        start, stop = offsets
        if not 0 <= start <= stop:
            raise ValueError(f"data_offsets {short(offsets)} are negative or reversed")
        if stop > size:
            raise ValueError(f"ends at byte {stop} of {size} bytes of data: the file is cut off")
        if math.prod(shape) * _SAFETENSORS_BITS[dtype] != 8 * (stop - start):
            raise ValueError(
                f"shape {short(shape)} of {dtype} does not fill the {stop - start} bytes of its "
                "data_offsets"
            )
        return _TensorInfo(dtype, tuple(shape), start, stop)

    def read(self, name: str, ndim: int) -> NDArray[Any]:
        info = self.names[name]
        try:
            _check_shape(info.shape, ndim)
            if info.dtype not in _SAFETENSORS_FLOATS:
                raise ValueError(
                    f"dtype {info.dtype}, where {_listed(_SAFETENSORS_FLOATS)} is read"
                )
            dtype = _SAFETENSORS_FLOATS[info.dtype]
            count = math.prod(info.shape)
            return _take(self.data, self.begin + info.start, count, dtype).reshape(info.shape)
        except ValueError as error:
            raise ValueError(f"{self.file}: tensor {name!r}: {error}") from None

    def eps(self, weight_name: str) -> object:
        said = self.metadata.get("eps")
        try:
            return None if said is None else float(said)
        except ValueError:
            return said


# --- ONNX ----------------------------------------------------------------------------------------

# Per type: how raw bytes are read, and the field that holds the values where there are no bytes.
_ONNX_DTYPES = {
    "FLOAT": ("<f4", "float_data"),
    "DOUBLE": ("<f8", "double_data"),
    "FLOAT16": ("<f2", "int32_data"),
    "BFLOAT16": ("<u2", "int32_data"),
    "INT8": ("|i1", "int32_data"),
    "UINT8": ("|u1", "int32_data"),
}

# The epsilon of a node that does not give the attribute.
_ONNX_EPS = {"LayerNormalization": 1e-5, "EmbedLayerNormalization": 1e-12}


class _Onnx:
    """An ONNX file: its graph, and the tensors that are asked for.

    A table is an initializer, or the output of nodes that dequantize one: ``Cast`` and ``Mul``, or
    ``DequantizeLinear``. Quantizers that dequantize the gathered rows and not the table leave no
    node under the table's name, but call its parts ``..._quantized``, ``..._scale`` and
    ``..._zero_point``.
    """

    def __init__(self, file: Path, stream: BinaryIO, mmap: bool) -> None:
        try:
            import onnx
        except ImportError as error:
            raise ImportError(
                f"{file}: reading ONNX files takes the package onnx: pip install 'bertinput[onnx]'"
            ) from error
        self.file = file
        self.mmap = mmap
        self.metadata: dict[str, str] = {}
        data = stream.read()
        try:
            graph = onnx.ModelProto.FromString(data).graph
        except Exception as error:  # protobuf's DecodeError; onnx gives it no name
            raise ValueError(
                f"{file} is not an ONNX file, or is cut off{_posing(data[:8])}: {error}"
            ) from error
        names = [tensor.name for tensor in graph.initializer]
        for node in graph.node:
            names += [node.op_type, *node.input, *node.output]
            names += [attribute.name for attribute in node.attribute]
        for name in names:
            if not isinstance(name, str):  # protobuf hands out the bytes
                raise ValueError(f"{file}: the name {short(name)} is not UTF-8")
        self.type_name = onnx.TensorProto.DataType.Name
        self.external = onnx.TensorProto.EXTERNAL
        self.nodes = list(graph.node)
        self.makers = {output: node for node in graph.node for output in node.output}
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.names = dict.fromkeys([*self.initializers, *self.makers])
        self.names.update(
            dict.fromkeys(name.removesuffix("_quantized") for name in self.initializers)
        )

    def read(self, name: str, ndim: int) -> NDArray[Any] | QuantizedTable:
        try:
            if name not in self.initializers:
                return self._quantized(name)
            array = self._initializer(name)
            _check_shape(array.shape, ndim)
            return array
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: tensor {name!r}: {error}") from error

    def eps(self, weight_name: str) -> object:
        for node in self.nodes:
            if node.op_type in _ONNX_EPS and weight_name in node.input:
                said = [attribute.f for attribute in node.attribute if attribute.name == "epsilon"]
                return said[0] if said else _ONNX_EPS[node.op_type]
        return None

    def _quantized(self, name: str) -> QuantizedTable:
        """Follow a table's name back to its values, its scale and perhaps its zero point."""
        node = self.makers.get(name)
        axis = 1  # a Mul broadcasts so, and it is the default of DequantizeLinear
        if node is None:
            parts = [f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"]
            parts = [part for part in parts if part in self.initializers]
        elif node.op_type == "DequantizeLinear":
            parts = [part for part in node.input if part]
            axis = next((item.i for item in node.attribute if item.name == "axis"), axis)
        elif node.op_type == "Mul":
            makers = [(part, self.makers.get(part)) for part in node.input]
            casts = [maker for _, maker in makers if maker is not None and maker.op_type == "Cast"]
            scales = [part for part, maker in makers if maker is None]
            parts = [part for cast in casts for part in cast.input] + scales
        else:
            raise ValueError(f"comes from a node {node.op_type}, which is not followed")
        if len(parts) not in (2, 3):
            raise ValueError(f"values and scale are wanted, not {_listed(parts) or 'nothing'}")

        values, scale, *zero_point = (self._initializer(part) for part in parts)
        if scale.dtype != np.float32:
            raise ValueError(f"the scale {parts[1]!r} is {scale.dtype}, not float32")
        table = QuantizedTable(values, scale, *zero_point)
        _check_shape(table.shape, ndim=2)
        # A square table's scales fit its columns as well, and there the axis means those.
        if scale.ndim == 1 and scale.size == values.shape[1] > 1 and axis not in (0, -2):
            raise ValueError(f"the scale {parts[1]!r} is one for each column, not for each row")
        return table

    def _initializer(self, name: str) -> NDArray[Any]:
        """Decode an initializer; one that lies in a file beside this one is mapped."""
        tensor = self.initializers.get(name)
        if tensor is None:
            raise ValueError(f"{name!r} is not an initializer")
        type_name = self.type_name(tensor.data_type)
        if type_name not in _ONNX_DTYPES:
            raise ValueError(f"{name!r} is {type_name}, where {_listed(_ONNX_DTYPES)} is read")
        dtype, field = _ONNX_DTYPES[type_name]
        shape = tuple(tensor.dims)
        if any(n < 0 for n in shape):  # which reshape would take for "whatever fits"
            raise ValueError(f"{name!r} has the shape {shape}")

        if tensor.data_location == self.external:
            where = {entry.key: entry.value for entry in tensor.external_data}
            array = self._outside(name, where, math.prod(shape), dtype)
        elif tensor.HasField("raw_data"):
            array = np.frombuffer(tensor.raw_data, dtype)
        elif field == "int32_data":  # one item's bits in each
            bits = np.array(tensor.int32_data, np.int32)
            array = bits.astype(f"<u{np.dtype(dtype).itemsize}").view(dtype)
        else:
            array = np.array(getattr(tensor, field), dtype)
        array = array.reshape(shape)
        array.flags.writeable = False
        return array

    def _outside(self, name: str, where: dict[str, str], count: int, dtype: str) -> NDArray[Any]:
        """Data in another file of the same folder, so that no model reads files at will."""
        data = Path(os.path.realpath(self.file.parent / where.get("location", "")))
        # A download cache links each file to where it keeps them all: that folder is allowed too.
        folders = {os.path.realpath(self.file.parent), os.path.dirname(os.path.realpath(self.file))}
        if not any(data.is_relative_to(folder) for folder in folders):
            raise ValueError(f"its data lie in {data}, outside the folder of the model")
        start = int(where.get("offset", 0))
        size = count * np.dtype(dtype).itemsize
        if int(where.get("length", size)) != size:
            raise ValueError(f"{where['length']} bytes of data do not fill its shape")
        if not data.is_file():
            raise FileNotFoundError(f"{self.file}: tensor {name!r}: its file {data} is not there")
        with open(data, "rb") as stream:
            end = os.fstat(stream.fileno()).st_size
            if not 0 <= start <= end - size:
                raise ValueError(f"{size} bytes from {start} on are not in {data} ({end} bytes)")
            return _take(_mapped(stream, self.mmap), start, count, dtype)
