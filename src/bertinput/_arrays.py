"""Arguments into ids, tables, result types and thread numbers, or into an error.

Both fronts, the function and the layers, take their arguments through here, and every message
that a caller can see is written here. Nothing is copied where the dtype allows it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from bertinput._core import TYPE_NAMES, Norm, Stage, Table
from bertinput.tables import BFloat16Table, QuantizedTable

__all__ = [
    "ROLES",
    "as_ids",
    "as_mask",
    "as_norm",
    "as_out",
    "as_table",
    "as_threads",
    "result_type",
]

ResultType = tuple[int, np.dtype[Any]]

_TYPES = {name: code for code, name in enumerate(TYPE_NAMES)}
_BFLOAT16 = _TYPES["bfloat16"]
ROLES = ("token", "position", "segment")


# ---- ids ----


def as_ids(name: str, value: Any) -> NDArray[Any]:
    """Ids as an array of integers; its number of dimensions is not judged here."""
    array = value if type(value) is np.ndarray else _as_array(name, value)
    if array.dtype.kind not in "iu":
        if array.size == 0 and isinstance(value, list | tuple | range):
            return array.astype(np.int64)  # [] and [[], []] are lists of no integers
        _refuse_ids(name, value, array)
    if isinstance(value, list | tuple) and _holds_bool(value):
        raise TypeError(f"{name} must be integers, and holds a bool")  # NumPy makes True a 1
    return array


def _holds_bool(items: Any) -> bool:
    return any(
        _holds_bool(item) if isinstance(item, list | tuple) else isinstance(item, bool | np.bool_)
        for item in items
    )


def _refuse_ids(name: str, value: Any, array: NDArray[Any]) -> NoReturn:
    if isinstance(value, list | tuple) and array.dtype.kind in "Of":
        # Python integers that no 64-bit integer holds make an array of objects or floats
        objects = np.asarray(value, dtype=object)
        items = objects.ravel().tolist()
        far = (
            [k for k, item in enumerate(items) if not -(2**63) <= item < 2**63]
            if all(type(item) is int for item in items)
            else []
        )
        if far:
            where = _element(name, far[0], objects.shape)
            raise IndexError(f"{where} is {items[far[0]]}, far out of range for any table")
    hint = ""
    if array.dtype.kind == "f":
        hint = "; round and cast them to integers first, if they are whole numbers"
    elif array.dtype.kind == "b":
        hint = "; was a mask passed?"
    elif array.dtype.kind in "US":
        hint = "; text must be tokenized first"
    elif isinstance(value, Mapping):
        hint = "; a tokenizer's batch goes to a layer"
    elif type(value) is list and value and _is_encoding(value[0]):
        hint = "; pass [encoding.ids for encoding in batch], padded to one length"
    known_by_type = array.dtype.kind == "O" and array.ndim == 0
    what = type(value).__name__ if known_by_type else _dtype_name(array.dtype)
    raise TypeError(f"{name} must be integers, not {what}{hint}")


def _as_array(name: str, value: Any) -> NDArray[Any]:
    """Any array-like as an array, without a copy where its protocol allows that."""
    torch = _torch_of(value)
    if torch is not None:
        return _from_torch(name, value, torch)
    if _is_masked(value):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass its filled()")
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except ValueError as error:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} cannot be read as an array: {error}") from error
        raise ValueError(
            f"{name} is not rectangular; pad the sequences to one length ({error})"
        ) from error
    except OverflowError as error:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} cannot be read as an array: {error}") from error
        raise IndexError(f"{name} holds an integer that is too large: {error}") from error
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name} cannot be read as an array: {error}") from error


def _is_masked(value: Any) -> bool:
    """Whether `value` is a masked array; NumPy loads its module for them when first used."""
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked is not None and isinstance(value, masked)


def _torch_of(value: Any) -> Any:
    """The torch module if `value` is one of its tensors; never imports it."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return torch if tensor is not None and isinstance(value, tensor) else None


def _from_torch(name: str, tensor: Any, torch: Any) -> NDArray[Any]:
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is a tensor on {tensor.device}; pass {name}.cpu()")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {tensor.layout}; it must be dense")
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        raise TypeError(f"{name} must be integers, not bfloat16")
    try:
        array: NDArray[Any] = tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is a tensor of {tensor.dtype}, unknown to NumPy") from error
    return array


# ---- tables ----

# NumPy's number of a dtype, whatever its byte order, to ours; bfloat16's is learnt when first met
_TABLE_TYPES = {np.dtype(name).num: _TYPES[name] for name in ("float64", "float32", "float16")}


def as_table(name: str, value: Any) -> Table:
    """A table, of any shape: what the shapes must be, they must be together."""
    array, code = _rows_of(name, value)
    given = value if isinstance(value, np.ndarray) else array
    if not isinstance(value, QuantizedTable):
        return Table(array, code, given)
    zero_point = value.zero_point
    if zero_point is not None:
        zero_point = np.atleast_1d(zero_point).astype(np.int32)
    return Table(array, code, array, np.atleast_1d(value.scale), zero_point)


def _rows_of(name: str, value: Any) -> tuple[NDArray[Any], int]:
    """A table's array and the code of its type."""
    if isinstance(value, QuantizedTable):
        return value.values, _TYPES[value.values.dtype.name]
    if isinstance(value, BFloat16Table):
        return value.bits, _BFLOAT16
    torch = _torch_of(value)
    if torch is not None and value.dtype is torch.bfloat16:
        return _from_torch(name, value.detach().view(torch.int16), torch), _BFLOAT16
    array = _as_array(name, value)
    code = _TABLE_TYPES.get(array.dtype.num)
    if code is None and array.dtype.name == "bfloat16":
        code = _TABLE_TYPES[array.dtype.num] = _BFLOAT16
    listed = isinstance(value, list | tuple)
    if array.dtype.kind in "iu" or (listed and (code is not None or array.size == 0)):
        return array.astype(np.float64), _TYPES["float64"]
    if code is None:
        raise TypeError(
            f"{name} must be float64, float32, float16, bfloat16 or integers, "
            f"not {_dtype_name(array.dtype)}"
        )
    return array, code


def readable(array: NDArray[Any]) -> NDArray[Any]:
    """A copy of a table in the layout that the kernels read."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _some_of(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of the names, small ones first."""
    several = list(names)
    for count in range(1, len(several) + 1):
        yield from combinations(several, count)


def unfit_tables(stage: Stage) -> ValueError:
    """What is wrong with the tables' shapes, and whether one transposed table explains it."""
    shapes = {
        f"{role}_embeddings": table.values.shape
        for role, table in zip(ROLES, (stage.token, stage.position, stage.segment), strict=True)
        if table is not None
    }
    for name, shape in shapes.items():
        if len(shape) != 2:
            return ValueError(f"{name} must be 2-D, (rows, width), not of shape {shape}")
        if shape[1] == 0:
            return ValueError(f"{name} has rows of width 0; its shape is {shape}")
    widths = {shape[1] for shape in shapes.values()}
    if len(widths) == 1:
        return ValueError(f"segment_embeddings has no rows; its shape is (0, {widths.pop()})")
    hint = ""
    for turned in _some_of(shapes):  # few before many
        if len({shape[0] if name in turned else shape[1] for name, shape in shapes.items()}) == 1:
            hint = f"; {' and '.join(turned)} transposed?"
            break
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return ValueError(f"tables must have one width (second axis): {listed}{hint}")


def is_bfloat16(table: Table) -> bool:
    return table.type == _BFLOAT16


# ---- LayerNorm ----


def as_norm(layer_norm: Any, width: int) -> Norm:
    """LayerNorm's ``(weight, bias or None, eps)``, copied in both types of computation."""
    if not isinstance(layer_norm, tuple | list) or len(layer_norm) != 3:
        raise TypeError("layer_norm must be a tuple (weight, bias or None, eps)")
    weight, bias, eps = layer_norm
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.floating | np.integer):
        raise TypeError(f"layer_norm's eps must be a number, not {type(eps).__name__}")
    if not 0 <= float(eps) < np.inf:
        raise ValueError(f"layer_norm's eps must be finite and not negative, not {eps}")
    vectors = np.full((2, width), -0.0)
    vectors[0] = _norm_vector("weight", weight, width)
    if bias is not None:
        vectors[1] = _norm_vector("bias", bias, width)
    # float64 values beyond float32 become infinite; a signalling NaN is none of our business
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = vectors.astype(np.float32)
    vectors.flags.writeable = False
    shown = vectors[1] if bias is not None else None
    return Norm(vectors[0], shown, vectors, narrow, float(eps))


def _norm_vector(name: str, value: Any, width: int) -> NDArray[np.float64]:
    array, code = _rows_of(f"layer_norm's {name}", value)
    if array.shape != (width,):
        raise ValueError(
            f"layer_norm's {name} must have shape ({width},), as wide as the tables, "
            f"not {array.shape}"
        )
    if code == _BFLOAT16:
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


# ---- batches and masks ----

_BATCH_KEYS = ("input_ids", "token_type_ids", "position_ids", "attention_mask")
_BATCH_ARGUMENTS = ("token_ids", "segment_ids", "position_ids", "attention_mask")


def unpack_batch(token_ids: Any, *others: Any) -> tuple[Any, ...]:
    """What a tokenizer returned, as the four arguments; other token ids pass through."""
    if isinstance(token_ids, Mapping):
        if "input_ids" not in token_ids:
            raise TypeError(
                f"a mapping in place of token_ids needs the key 'input_ids'; it has "
                f"{sorted(map(str, token_ids))}"
            )
        found = [token_ids.get(key) for key in _BATCH_KEYS]
    elif _is_encoding(token_ids):
        found = [token_ids.ids, token_ids.type_ids, None, token_ids.attention_mask]
    elif isinstance(token_ids, tuple) and hasattr(token_ids, "_fields"):
        raise TypeError(
            f"token_ids must be integers, not the named tuple {type(token_ids).__name__}"
        )
    else:
        return token_ids, *others
    for k, given in enumerate(others, start=1):
        if given is not None:
            if found[k] is not None:
                raise TypeError(
                    f"{_BATCH_ARGUMENTS[k]} is given, and the batch has {_BATCH_KEYS[k]} too"
                )
            found[k] = given
    return tuple(found)


def _is_encoding(value: Any) -> bool:
    encoding = getattr(sys.modules.get("tokenizers"), "Encoding", None)
    return encoding is not None and isinstance(value, encoding)


def as_mask(value: Any) -> NDArray[Any]:
    """An attention mask as an array of numbers."""
    mask = _as_array("attention_mask", value)
    if mask.dtype.kind not in "biuf":
        raise TypeError(f"attention_mask must be numbers, not {_dtype_name(mask.dtype)}")
    return mask


def check_mask(mask: NDArray[Any], token_ids: NDArray[Any], out: NDArray[Any] | None) -> None:
    """Refuse a mask that does not broadcast to the tokens' shape, or that `out` overlaps."""
    wanted = token_ids.shape[token_ids.ndim - mask.ndim :]
    if not 0 < mask.ndim <= token_ids.ndim or any(
        have not in (1, want) for have, want in zip(mask.shape, wanted, strict=True)
    ):
        raise no_broadcast("attention_mask", mask, token_ids)
    if out is not None and np.may_share_memory(out, mask):
        raise overlapping_out("attention_mask")


# ---- results ----

_RESULTS: dict[Any, ResultType] = {}
for _name in ("float64", "float32", "float16"):
    _RESULTS[_name] = _RESULTS[getattr(np, _name)] = _RESULTS[np.dtype(_name)] = (
        _TYPES[_name],
        np.dtype(_name),
    )


def result_type(dtype: Any) -> ResultType:
    """A result's dtype as its code and NumPy's object for it."""
    try:
        return _RESULTS[dtype]
    except (KeyError, TypeError):
        pass
    if isinstance(dtype, str) and dtype == "bfloat16":
        return _TYPES["bfloat16"], bfloat16_dtype("a bfloat16 result")
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in TYPE_NAMES[: _BFLOAT16 + 1]:
        named = getattr(dtype, "__name__", dtype) if found is None else _dtype_name(found)
        raise TypeError(f"dtype must be float64, float32, float16 or bfloat16, not {named}")
    if not found.isnative:
        raise TypeError(f"dtype must be of this machine's byte order, not {found.str}")
    return _TYPES[found.name], found


def bfloat16_dtype(purpose: str) -> np.dtype[Any]:
    """NumPy's bfloat16, from ``ml_dtypes``; `purpose` says in an error what needs it."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs ml_dtypes, which teaches NumPy bfloat16: "
            "pip install 'bertinput[bfloat16]'"
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def as_out(out: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The caller's array for the result, checked for type."""
    if out is None:
        return None
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray, not {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(
            f"out has dtype {_dtype_name(out.dtype)}, but the result is {_dtype_name(dtype)}; "
            "pass dtype= to match it"
        )
    return out


_MOST_THREADS = 1 << 16


def as_threads(num_threads: Any) -> int:
    """The number of threads, 0 where the choice is left to the package."""
    if num_threads is None:
        return 0
    if type(num_threads) is int and 0 < num_threads <= _MOST_THREADS:  # 40 ns, not 280
        return num_threads
    if isinstance(num_threads, bool | np.bool_) or not hasattr(num_threads, "__index__"):
        kind = type(num_threads).__name__
        raise TypeError(f"num_threads must be an integer or None, not {kind}")
    number = int(num_threads.__index__())
    if number < 1:
        raise ValueError(f"num_threads must be at least 1, not {number}")
    return min(number, _MOST_THREADS)


# ---- what the core finds wrong, in words ----


def no_dimensions(name: str) -> ValueError:
    return ValueError(f"{name} is 0-D; ids have shape (S,), (B, S) or (..., S)")


def no_broadcast(name: str, ids: NDArray[Any], token_ids: NDArray[Any]) -> ValueError:
    if ids.ndim == 0:
        return no_dimensions(name)
    hint = ""
    if ids.ndim == 2 and ids.shape[::-1] == token_ids.shape:
        hint = "; transposed?"
    return ValueError(
        f"{name} of shape {ids.shape} does not broadcast to token_ids' shape "
        f"{token_ids.shape}{hint}"
    )


def unfit_out(out: NDArray[Any], token_ids: NDArray[Any], width: int) -> ValueError:
    shape = (*token_ids.shape, width)
    if out.shape != shape:
        return ValueError(f"out has shape {out.shape}, but the result's is {shape}")
    if not out.flags.c_contiguous:
        return ValueError(f"out must be C-contiguous; its strides are {out.strides}")
    return ValueError("out is read-only")


def overlapping_out(name: str) -> ValueError:
    return ValueError(f"out overlaps {name} in memory")


def too_long(token_ids: NDArray[Any], rows: int) -> ValueError:
    return ValueError(
        f"token_ids holds sequences of {token_ids.shape[-1]} tokens, but position_embeddings has "
        f"{rows} rows; truncate the sequences, or pass position_ids"
    )


def out_of_range(role: str, ids: NDArray[Any], place: int, value: int, rows: int) -> IndexError:
    if value < 0 and ids.dtype.kind == "u":
        value += 2**64
    where = _element(f"{role}_ids", place, ids.shape)
    if value < 0:
        cause = "negative ids never wrap"
    elif role == "segment":
        cause = (
            "was an attention mask passed as segment_ids?"
            if rows == 1 and value == 1
            else ("the table's rows are the segments that the model knows")
        )
    elif role == "position":
        cause = "the sequence runs past the position table"
    elif value == rows:
        cause = "was a token added to the vocabulary without a row for it?"
    else:
        cause = "do the ids come from this model's own tokenizer?"
    span = f"0 to {rows - 1}" if rows else "none"
    return IndexError(
        f"{where} is {value}, out of range for {role}_embeddings with {rows} rows "
        f"(valid: {span}); {cause}"
    )


def changed_meanwhile(role: str) -> IndexError:
    return IndexError(
        f"{role}_ids went out of range during the call: another thread wrote to them; "
        "the result is incomplete"
    )


def _element(name: str, place: int, shape: tuple[int, ...]) -> str:
    index = ", ".join(str(int(k)) for k in np.unravel_index(place, shape))
    return f"{name}[{index}]"


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "O":
        return "object"
    if dtype.kind in "US":
        return "str" if dtype.kind == "U" else "bytes"
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"
