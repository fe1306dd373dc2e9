"""The layers that a service keeps: tables checked once, then called often."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from bertinput import _arrays
from bertinput._core import Stage, Table
from bertinput.families import Family, family_named
from bertinput.functional import bert_embeddings
from bertinput.tables import BFloat16Table, QuantizedTable

if TYPE_CHECKING:
    from bertinput.checkpoints import Fingerprint

__all__ = ["BERTStyleEmbedding", "BertEmbeddings"]

_ndarray = np.ndarray  # a global is found faster than an attribute


class BertEmbeddings:
    """The input stage of a BERT-like model: tables, the order of their sum, LayerNorm.

    Tables are checked once and read where they are; then the layer is called many times, from
    any number of threads at once. It is immutable, and releases the GIL while it computes.

    Parameters
    ----------
    token_embeddings : array_like, shape (vocab_size, H)
        As in `bert_embeddings`; a `QuantizedTable` stands here too.
    position_embeddings : array_like, shape (max_length, H), optional
    segment_embeddings : array_like, shape (num_segments, H), optional
        Tables that are not given are not added.
    layer_norm : tuple, optional
        ``(weight, bias, eps)``: shapes (H,), (H,) or None, and a number. Copied.
    family : str
        The ``model_type``, which says in which order rows are added.

    Attributes
    ----------
    family : str
    width : int
        H, the width of a row.
    vocab_size : int
        Rows of the token table.
    max_length : int or None
        The longest sequence: rows of the position table. None: no limit.
    eps : float or None
        LayerNorm's epsilon. None: no LayerNorm.

    Raises
    ------
    TypeError
        A table is of a type that is not read.
    ValueError
        Tables are not 2-D or not of one width, LayerNorm is of another width, the family is
        unknown.

    Notes
    -----
    The result is not what a Hugging Face model takes as ``inputs_embeds``, which wants the token
    rows alone and adds the rest again: use `inputs_embeds` for that.
    """

    __slots__ = ("__weakref__", "_family", "_given", "_source", "_stage", "_token_stage")

    _family: Family
    _stage: Stage
    _token_stage: Stage
    _given: tuple[Any, ...]
    _source: tuple[str, dict[str, Any], Fingerprint] | None

    def __init__(
        self,
        token_embeddings: Any,
        position_embeddings: Any = None,
        segment_embeddings: Any = None,
        *,
        layer_norm: Sequence[Any] | None = None,
        family: str = "bert",
    ) -> None:
        if hasattr(self, "_stage"):
            raise AttributeError("BertEmbeddings is immutable; it cannot be initialised again")
        declared = family_named(family)
        given = (token_embeddings, position_embeddings, segment_embeddings)
        token = _arrays.as_table("token_embeddings", token_embeddings)
        position, segment = (
            None if table is None else _arrays.as_table(name, table)
            for name, table in (
                ("position_embeddings", position_embeddings),
                ("segment_embeddings", segment_embeddings),
            )
        )
        tables = (token, position, segment)
        roles = [_arrays.ROLES.index(role) for role in declared.order]
        token_stage = Stage(token, None, None, (0,))
        norm = None
        if layer_norm is not None and token_stage.fits:
            norm = _arrays.as_norm(layer_norm, token_stage.width)
        order = tuple(role for role in roles if tables[role] is not None)
        stage = Stage(token, position, segment, order, norm)
        if not stage.fits:
            raise _arrays.unfit_tables(stage)
        _set(
            self,
            _family=declared,
            _stage=stage,
            _token_stage=token_stage,
            _given=tuple(map(_kept, tables, given)),
            _source=None,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        family: str | None = None,
        eps: float | None = None,
        mmap: bool = True,
    ) -> BertEmbeddings:
        """Read the input stage out of a checkpoint; nothing else of the model is read.

        Parameters
        ----------
        path : str or path-like
            A directory with ``config.json`` and ``model.safetensors``, a lone safetensors file,
            or an ONNX file (needs ``bertinput[onnx]``).
        family, eps : str, float, optional
            For files that do not say: the ``model_type`` and LayerNorm's epsilon.
        mmap : bool
            Map the tables, so that they take no memory of this process's own and are shared
            between processes. Replacing a mapped file by a rename is safe, changing it in place
            is not supported. False: copy them.

        Raises
        ------
        FileNotFoundError
            There is no such path, or no checkpoint in the directory.
        ValueError
            The file is malformed, lacks a table, or is of an unknown family.
        ImportError
            An ONNX file, and ``onnx`` is not installed.
        """
        # here and below: a process that reads no checkpoint need not load the readers
        from bertinput.checkpoints import fingerprint, read_checkpoint

        found = read_checkpoint(path, family=family, eps=eps, mmap=mmap)
        layer = cls(
            found.token_embeddings,
            found.position_embeddings,
            found.segment_embeddings,
            layer_norm=found.layer_norm,
            family=found.family.name,
        )
        arguments = {"family": layer.family, "eps": layer.eps, "mmap": mmap}
        _set(layer, _source=(os.path.abspath(path), arguments, fingerprint(path)))
        return layer

    def __call__(
        self,
        token_ids: Any,
        segment_ids: ArrayLike | None = None,
        *,
        position_ids: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        out: NDArray[Any] | None = None,
        num_threads: int | None = None,
    ) -> NDArray[Any]:
        """Compute the finished stage: the sum of the rows, then LayerNorm.

        Parameters
        ----------
        token_ids : array_like of integers, shape (..., S), or a tokenizer's result
            A mapping with ``input_ids`` and perhaps ``token_type_ids``, ``attention_mask`` and
            ``position_ids``, or a ``tokenizers.Encoding``, brings the other ids along.
        segment_ids, position_ids : array_like of integers, broadcast to the shape of `token_ids`
            As in `bert_embeddings`. Where the model has no such table they are checked for type
            and shape, and ignored.
        attention_mask : array_like, broadcast to the shape of `token_ids`, optional
            Checked for shape, and without effect: padding is computed like any other row.
        dtype, out, num_threads
            As in `bert_embeddings`, but `dtype` is float32 if not given.

        Returns
        -------
        numpy.ndarray
            Shape ``token_ids.shape + (H,)``. LayerNorm is computed in the widest of float32,
            `dtype` and the tables' types, and rounded once to `dtype`.

        Raises
        ------
        IndexError, TypeError, ValueError, MemoryError
            As `bert_embeddings` does, before anything is written.
        """
        if type(token_ids) is not _ndarray:
            token_ids, segment_ids, position_ids, attention_mask = _arrays.unpack_batch(
                token_ids, segment_ids, position_ids, attention_mask
            )
        return self._stage.run(
            token_ids,
            segment_ids,
            position_ids,
            attention_mask,
            dtype,
            out,
            num_threads,
            True,
        )

    def sum(
        self,
        token_ids: Any,
        segment_ids: ArrayLike | None = None,
        *,
        position_ids: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
        dtype: DTypeLike = np.float32,
        out: NDArray[Any] | None = None,
        num_threads: int | None = None,
    ) -> NDArray[Any]:
        """Compute the sum of the rows alone, before LayerNorm, in the family's order of addition.

        Parameters, result and errors are those of calling the layer. From float32 tables to
        float32, the result is bit for bit that of the reference implementation.
        """
        if type(token_ids) is not _ndarray:
            token_ids, segment_ids, position_ids, attention_mask = _arrays.unpack_batch(
                token_ids, segment_ids, position_ids, attention_mask
            )
        return self._stage.run(
            token_ids,
            segment_ids,
            position_ids,
            attention_mask,
            dtype,
            out,
            num_threads,
            False,
        )

    def inputs_embeds(
        self,
        token_ids: Any,
        *,
        dtype: DTypeLike = np.float32,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Gather the token rows alone: what Hugging Face models take as ``inputs_embeds``."""
        segments = positions = mask = None  # what a batch brings is checked for type and shape
        if type(token_ids) is not _ndarray:
            token_ids, segments, positions, mask = _arrays.unpack_batch(
                token_ids, segments, positions, mask
            )
        return self._token_stage.run(token_ids, segments, positions, mask, dtype, out, None, False)

    # ---- what it holds ----

    @property
    def token_embeddings(self) -> Any:
        """The token table: a read-only array, or a `QuantizedTable`."""
        return _shown(self._given[0])

    @property
    def position_embeddings(self) -> Any:
        """The position table, or None."""
        return _shown(self._given[1])

    @property
    def segment_embeddings(self) -> Any:
        """The segment table, or None."""
        return _shown(self._given[2])

    @property
    def layer_norm(self) -> tuple[NDArray[Any], NDArray[Any] | None, float] | None:
        """``(weight, bias, eps)`` in float64, or None."""
        norm = self._stage.norm
        return None if norm is None else (_shown(norm.weight), _shown(norm.bias), norm.eps)

    @property
    def family(self) -> str:
        """The ``model_type``."""
        return self._family.name

    @property
    def width(self) -> int:
        """Width of a row, H."""
        return self._stage.width

    @property
    def vocab_size(self) -> int:
        """Rows of the token table."""
        return int(self._given[0].shape[0])

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest sequence, or None if there is no limit."""
        positions = self._given[1]
        return None if positions is None else int(positions.shape[0])

    @property
    def eps(self) -> float | None:
        """LayerNorm's epsilon, or None."""
        norm = self._stage.norm
        return None if norm is None else norm.eps

    def __repr__(self) -> str:
        norm = "no LayerNorm" if self.eps is None else f"LayerNorm eps={self.eps:g}"
        tables = ", ".join(
            f"{role} {_kind(table)} {tuple(table.shape)}"
            for role, table in zip(_arrays.ROLES, self._given, strict=True)
            if table is not None
        )
        return f"<BertEmbeddings {self.family}: {tables}; {norm}>"

    # ---- immutable ----

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"BertEmbeddings is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"BertEmbeddings is immutable; {name!r} cannot be deleted")

    def __copy__(self) -> BertEmbeddings:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BertEmbeddings:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._source is not None:
            return _reopen, (type(self), *self._source)
        return _rebuild, (type(self), self._given, self.layer_norm, self.family)


def _reopen(
    kind: type[BertEmbeddings], path: str, arguments: dict[str, Any], expected: Fingerprint
) -> BertEmbeddings:
    """Unpickle a layer that came from a file: map the same file again."""
    from bertinput.checkpoints import fingerprint

    if fingerprint(path) != expected:
        raise ValueError(
            f"{path} is not the file that the pickled layer was read from: its size or its first "
            "MiB, where the header lies, changed"
        )
    return kind.from_pretrained(path, **arguments)


def _rebuild(
    kind: type[BertEmbeddings], given: tuple[Any, ...], layer_norm: Any, family: str
) -> BertEmbeddings:
    return kind(*given, layer_norm=layer_norm, family=family)


def _set(layer: BertEmbeddings, **values: Any) -> None:
    """Set attributes of a layer under construction."""
    for name, value in values.items():
        object.__setattr__(layer, name, value)


def _kept(table: Table | None, given: Any) -> Any:
    """A table as the layer shows and pickles it: read-only, in the layout that is read."""
    if table is None or isinstance(given, QuantizedTable):
        return given
    view = table.values.view()
    view.flags.writeable = False
    if _arrays.is_bfloat16(table) and view.dtype.kind in "iu":
        return BFloat16Table(view.view(np.uint16))
    return view


def _shown(table: Any) -> Any:
    """A view of its own for each who asks: its shape and flags are not the layer's."""
    if isinstance(table, BFloat16Table):
        return table.bits.view(_arrays.bfloat16_dtype("a bfloat16 table as an array"))
    return table.view() if isinstance(table, np.ndarray) else table


def _kind(table: Any) -> str:
    if isinstance(table, BFloat16Table):
        return "bfloat16"
    return str(table.values.dtype if isinstance(table, QuantizedTable) else table.dtype)


class BERTStyleEmbedding:
    """Random token, position and segment tables of BERT's shapes: to learn, to test, to start.

    Parameters
    ----------
    vocab_size, max_seq_len, embed_dim, num_segments : int
        Rows of the token, position and segment tables, and the width of all.
    seed : int, optional
        The same seed gives the same tables as ``numpy.random.seed(seed)`` followed by
        ``numpy.random.randn(...) * 0.02`` for token, position and segment, in that order;
        NumPy's global state is left alone.

    Attributes
    ----------
    token_embeddings, position_embeddings, segment_embeddings : numpy.ndarray of float64
    vocab_size, max_seq_len, embed_dim : int
    """

    def __init__(
        self,
        vocab_size: int,
        max_seq_len: int,
        embed_dim: int,
        num_segments: int = 2,
        seed: Any = None,
    ) -> None:
        random = np.random.RandomState(seed)
        self.token_embeddings = random.randn(vocab_size, embed_dim) * 0.02
        self.position_embeddings = random.randn(max_seq_len, embed_dim) * 0.02
        self.segment_embeddings = random.randn(num_segments, embed_dim) * 0.02
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.embed_dim = embed_dim

    def forward(
        self, token_ids: ArrayLike, segment_ids: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Sum the three rows of every token; a float64 result of shape (..., S, embed_dim).

        Arguments and errors are those of `bert_embeddings`; without `segment_ids` all are 0.
        """
        return bert_embeddings(
            token_ids,
            segment_ids,
            self.token_embeddings,
            self.position_embeddings,
            self.segment_embeddings,
        )

    __call__ = forward
