"""One call, any input, checked: the sum of token, position and segment rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from bertinput._core import embed

__all__ = ["bert_embeddings"]


def bert_embeddings(
    token_ids: ArrayLike,
    segment_ids: ArrayLike | None,
    token_embeddings: Any,
    position_embeddings: Any,
    segment_embeddings: Any,
    *,
    position_ids: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
) -> NDArray[Any]:
    """Sum the token, position and segment rows of every token: BERT's input embeddings.

    ``E[..., s, :] = token_embeddings[token_ids[..., s]] + position_embeddings[p] +
    segment_embeddings[segment_ids[..., s]]``, where ``p`` is ``s`` unless `position_ids` gives
    it (Devlin et al., "BERT", 2019, section 3).

    Parameters
    ----------
    token_ids : array_like of integers, shape (..., S)
        Rows of `token_embeddings`. Arrays of any integer dtype, byte order and strides, nested
        lists, and whatever offers ``__array__``, ``__dlpack__`` or a buffer; read without a copy
        where the dtype allows it.
    segment_ids : array_like of integers, broadcast to the shape of `token_ids`, or None
        Rows of `segment_embeddings`: 0 for sentence A, 1 for sentence B. None: all 0.
    token_embeddings, position_embeddings, segment_embeddings : array_like, shape (rows, H)
        Tables of one width. float64, float32, float16 and bfloat16 with contiguous rows are read
        as they are, others are copied once; integers and nested lists are cast to float64.
        A `QuantizedTable` is decoded row by row.
    position_ids : array_like of integers, broadcast to the shape of `token_ids`, optional
        Rows of `position_embeddings`; the place in the sequence if not given.
    dtype : float64, float32, float16 or bfloat16
        Type of the result (bfloat16 needs ``ml_dtypes``).
    out : numpy.ndarray, optional
        Where to write the result: C-contiguous, of its shape and dtype, apart from all inputs.
    num_threads : int, optional
        At most so many threads; if not given, chosen from the size of the work and the CPUs that
        this process may use.

    Returns
    -------
    numpy.ndarray
        Shape ``token_ids.shape + (H,)``, C-contiguous; `out` if given. Equal, bit for bit, to
        NumPy's ``(token_row + position_row) + segment_row`` in the widest of `dtype` and the
        tables' types (float32 at the least), rounded once to `dtype`.

    Raises
    ------
    IndexError
        An id is negative or not below its table's number of rows; negative ids never wrap.
    TypeError
        Ids are not integers, a table or `dtype` is of a type not listed above, `out` is of
        another dtype.
    ValueError
        Shapes do not fit; a sequence is longer than the position table; `out` is of another
        shape, not contiguous, read-only, or overlaps an input.
    MemoryError
        The result is too large. Every error comes before `out` is written.

    Examples
    --------
    >>> import numpy as np
    >>> from bertinput import bert_embeddings
    >>> bert_embeddings([[0, 1]], [[0, 1]], [[1.0, 2.0], [3.0, 4.0]], [[0.5, 0.5], [0.25, 0.25]],
    ...                 [[0.0, 0.0], [1.0, -1.0]])
    array([[[1.5 , 2.5 ],
            [4.25, 3.25]]])
    """
    return embed(
        token_ids,
        segment_ids,
        token_embeddings,
        position_embeddings,
        segment_embeddings,
        position_ids,
        dtype,
        out,
        num_threads,
    )
