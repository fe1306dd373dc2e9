"""Tables that NumPy's own dtypes cannot hold: quantized rows, and bfloat16 by its bits.

Both stand wherever a table may. Neither is ever expanded as a whole: the compiled core decodes
the rows that a call asks for.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BFloat16Table", "QuantizedTable"]


class QuantizedTable:
    """A table of int8 or uint8 rows with a float32 scale: ``(value - zero_point) * scale``.

    Parameters
    ----------
    values : array_like of int8 or uint8, shape (N, H)
        The quantized rows, read as they are.
    scale : array_like of float32, shape (N,), (N, 1), (1,) or ()
        One scale for each row, or one for the table.
    zero_point : array_like of the dtype of `values`, shape (N,), (N, 1), (1,) or (), optional
        The value that stands for 0; 0 if not given (symmetric quantization).

    Attributes
    ----------
    values, scale, zero_point : numpy.ndarray
        Read-only; `scale` and `zero_point` have shape (N,) or (), `zero_point` may be None.

    Raises
    ------
    TypeError
        If a dtype is another one.
    ValueError
        If a shape is another one.

    Notes
    -----
    The formula is that of ONNX ``DequantizeLinear``: the difference is exact, the product is
    rounded once to float32.
    """

    __slots__ = ("__weakref__", "_scale", "_values", "_zero_point")

    _values: NDArray[Any]
    _scale: NDArray[np.float32]
    _zero_point: NDArray[Any] | None

    def __init__(
        self, values: ArrayLike, scale: ArrayLike, zero_point: ArrayLike | None = None
    ) -> None:
        if hasattr(self, "_values"):
            raise AttributeError("QuantizedTable is immutable; it cannot be initialised again")
        array = np.asarray(values)
        if array.dtype not in (np.int8, np.uint8):
            raise TypeError(f"values must be int8 or uint8, not {array.dtype}")
        if array.ndim != 2:
            raise ValueError(f"values must have shape (N, H), not {array.shape}")
        scales = np.asarray(scale)
        if scales.dtype.kind != "f" or scales.dtype.itemsize > 8:
            raise TypeError(f"scale must be float32, not {scales.dtype}")
        with np.errstate(over="ignore"):
            narrow = scales.astype(np.float32)
        # Python's own numbers have no dtype to keep; an array of float64 is not rounded in silence
        if isinstance(scale, np.ndarray) and not np.array_equal(narrow, scales, equal_nan=True):
            raise TypeError(f"scale must be float32; a {scales.dtype} value would be rounded")
        zeros = None
        if zero_point is not None:
            zeros = np.asarray(zero_point)
            if zeros.dtype.kind == "i" and isinstance(zero_point, int):
                limits = np.iinfo(array.dtype)
                if not limits.min <= zero_point <= limits.max:
                    raise ValueError(f"zero_point {zero_point} does not fit {array.dtype}")
                zeros = zeros.astype(array.dtype)
            if zeros.dtype != array.dtype:
                raise TypeError(
                    f"zero_point must have the dtype of values, {array.dtype}, not {zeros.dtype}"
                )
            zeros = _per_row("zero_point", zeros, array.shape[0])
        object.__setattr__(self, "_values", _read_only(array))
        object.__setattr__(self, "_scale", _per_row("scale", narrow, array.shape[0]))
        object.__setattr__(self, "_zero_point", zeros)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"QuantizedTable is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"QuantizedTable is immutable; {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedTable, (self.values, self.scale, self.zero_point)

    # Views: their shape and flags are not the table's.

    @property
    def values(self) -> NDArray[Any]:
        """The quantized rows."""
        return self._values.view()

    @property
    def scale(self) -> NDArray[np.float32]:
        """One scale for each row, or one for the table."""
        return self._scale.view()

    @property
    def zero_point(self) -> NDArray[Any] | None:
        """The value that stands for 0 in each row or in the table, or None."""
        return None if self._zero_point is None else self._zero_point.view()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        rows, width = self._values.shape
        return rows, width

    def __repr__(self) -> str:
        per = "row" if self.scale.ndim else "table"
        return f"QuantizedTable({self.values.dtype}, shape={self.shape}, one scale per {per})"


class BFloat16Table:
    """A bfloat16 table by its bits: uint16 of shape (N, H), each the top half of a float32.

    This is how a bfloat16 checkpoint is read where ``ml_dtypes`` is not installed.
    """

    __slots__ = ("bits",)

    def __init__(self, bits: NDArray[np.uint16]) -> None:
        self.bits = bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        return self.bits.shape


def _per_row(name: str, array: NDArray[Any], rows: int) -> NDArray[Any]:
    """Shape (N,) for a value per row, () for one value for the table; a private copy."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape == (1,) and rows != 1:
        array = array[0]
    if array.shape not in ((), (rows,)):
        raise ValueError(f"{name} must have shape ({rows},) or (), not {array.shape}")
    copy = np.array(array)
    copy.flags.writeable = False
    return copy


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
