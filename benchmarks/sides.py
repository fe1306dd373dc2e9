"""Who is timed. A side is one statement: the text that the report prints is the text that runs.

All sides of a group read the same tables in the same memory, 64-byte aligned unless said, and ids
of int64 that were prepared in advance (ONNX Runtime's fused operator takes only int32, so it gets
those). All run on one thread unless said. Each is held to a plain NumPy computation before it is
timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import bertinput
from benchmarks.floor import NoFloor, compiled_floor
from benchmarks.machine import installed
from benchmarks.workload import Ids, Norm, Point, Tables, aligned

__all__ = [
    "NOTES",
    "OURS_TOLERANCE",
    "PEER_TOLERANCE",
    "Absent",
    "Array",
    "Side",
    "Sides",
    "check",
    "floor_sides",
    "normalised",
    "numpy_sides",
    "onnx_side",
    "our_names",
    "out_array",
    "token_position_segment",
    "token_segment_position",
    "torch_norm_side",
    "torch_sum_side",
]

Array = NDArray[Any]

OURS_TOLERANCE = 2e-6  # what the package promises for LayerNorm
PEER_TOLERANCE = 1e-5  # enough to tell a right LayerNorm from a wrong one

NOTES = {
    "bertinput": "num_threads=1 unless the statement says otherwise. out is a plain numpy.empty "
    "array, kept; without out= the result is new and dropped each time.",
    "NumPy": "new temporaries and a new result, dropped each time. Before anything else the "
    "process frees one block of 31 MiB, as a long-lived one has done sooner or later: glibc's "
    "malloc then keeps temporaries of up to 32 MiB instead of giving them back.",
    "NumPy, fresh": "the same statement in a fresh process, which may give its temporaries back "
    "to the system after every call and fetch them again: see page faults. Whether it does hangs "
    "on the layout of the heap: this is the widest gap that a caller can meet, not the usual one.",
    "NumPy, kept": "the same sum with two kept buffers, nothing allocated at all; "
    'mode="clip" spares take() another buffer and is its fastest mode.',
    "PyTorch": "torch.set_num_threads(1), everything under torch.inference_mode(), tensors made "
    "in advance by torch.from_numpy; .add_() is what += calls. Its allocator is left as it is "
    "installed, without huge pages (THP_MEM_ALLOC_ENABLE=1 turns them on): see page faults.",
    "ONNX Runtime": "CPUExecutionProvider, opset 17, intra-op and inter-op threads 1, spinning "
    "off. The fastest of its forms was taken: shapes fixed, so that the Slice is folded when the "
    "session is made; tables shared as external initializers; inputs and a kept output bound "
    "once by IOBinding. Graph of the sum: Add(Add(Gather(T, t), Gather(G, g)), Slice(P, 0, S)). "
    "With LayerNorm: com.microsoft.EmbedLayerNormalization(t, g, T, P, G, weight, bias), whose "
    "ids are int32.",
    "floor": "benchmarks/floor.c, cc -O3, one memcpy for each token row into the very array that "
    "the layer writes, which starts at 64 bytes like the tables, where memcpy is fastest. Both "
    "repeat their work inside compiled code: the time of one call is that of 1 + N calls less that "
    "of one, divided by N. The layer's part includes the check of all ids and leaves the arguments "
    "aside; the floor checks nothing.",
    "mapped tables": "a safetensors file in a temporary folder, read by from_pretrained: tables "
    "start where the file's header ends, at a multiple of 8 bytes.",
}


@dataclass(frozen=True)
class Side:
    """A statement, the names in it, and what it must compute.

    A side that writes into a kept array calls that array `out`. `tolerance` is relative to the
    largest element of each row; 0 asks for the same type and bits. `expected` computes the result,
    or of its `last` so many sequences; None: nothing is computed. A side that `repeats` its work
    inside compiled code has the name `calls`, which says how often.
    """

    name: str
    statement: str
    names: dict[str, Any]
    expected: Callable[[], Array] | None
    tolerance: float = 0.0
    repeats: bool = False
    last: int = 0


@dataclass(frozen=True)
class Absent:
    """A side that cannot be timed here, and why."""

    name: str
    reason: str


Sides = list[Side | Absent]


def check(side: Side) -> float:
    """Run a side once and return its largest error; ArithmeticError if beyond its tolerance."""
    out = side.names.get("out")
    if out is None:
        actual = np.asarray(eval(side.statement, side.names))
    else:
        out.fill(np.nan)
        exec(side.statement, side.names)
        actual = out
    if side.expected is None:
        return 0.0
    actual, expected = actual[-side.last :], side.expected()  # -0: all of it
    if actual.shape != expected.shape:
        raise ArithmeticError(f"{side.statement}: {actual.shape} instead of {expected.shape}")
    if side.tolerance == 0:
        bits = f"u{expected.itemsize}"
        if actual.dtype != expected.dtype or (actual.view(bits) != expected.view(bits)).any():
            raise ArithmeticError(f"{side.statement}: not the bits of NumPy's sum")
        return 0.0
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    error = float((np.abs(actual - expected) / largest).max())
    if not error <= side.tolerance:
        raise ArithmeticError(f"{side.statement}: off by {error:.1e} of its row's largest element")
    return error


# ---- what must come out, in both orders of addition ----


def token_position_segment(tables: Tables, ids: Ids, dtype: type[np.floating[Any]]) -> Array:
    """NumPy's sum in the order of the seed's function, computed in `dtype`."""
    token, position, segment = tables
    total: Array = token[ids.token].astype(dtype) + position[: ids.token.shape[1]].astype(dtype)
    total += segment[ids.segment]
    return total


def token_segment_position(tables: Tables, ids: Ids) -> Array:
    """NumPy's sum in the order of BERT's reference implementation."""
    token, position, segment = tables
    total: Array = token[ids.token] + segment[ids.segment]
    total += position[: ids.token.shape[1]]
    return total


def normalised(total: Array, norm: Norm) -> Array:
    """LayerNorm of a float32 sum, in float64."""
    wide = total.astype(np.float64)
    wide -= wide.mean(axis=-1, keepdims=True)
    wide /= np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + norm.eps)
    wide *= norm.weight
    wide += norm.bias
    return wide


# ---- names that statements use ----


def out_array(point: Point, dtype: DTypeLike) -> Array:
    """A result array as callers make one."""
    return np.empty(point, dtype)


def our_names(tables: Tables, ids: Ids) -> dict[str, Any]:
    """Names of the package's own statements."""
    return {
        "bert_embeddings": bertinput.bert_embeddings,
        "float32": np.float32,
        "token_ids": ids.token,
        "segment_ids": ids.segment,
        **dict(zip("TPG", tables, strict=True)),
    }


def numpy_sides(point: Point, tables: Tables, ids: Ids, fresh: bool) -> Sides:
    """NumPy's expression, and unless the process is to stay fresh, that without allocation."""
    names = {
        "np": np,
        "t": ids.token,
        "g": ids.segment,
        "S": point.length,
        **dict(zip("TPG", tables, strict=True)),
    }
    dtype = tables.token.dtype.type

    def expected() -> Array:
        return token_position_segment(tables, ids, dtype)

    statement = "T[t] + P[:S] + G[g]"
    if fresh:
        return [Side("NumPy, fresh", statement, names, expected)]
    return [
        Side("NumPy", statement, names, expected),
        Side(
            "NumPy, kept",
            'np.take(T, t, axis=0, out=out, mode="clip"); np.add(out, P[:S], out=out); '
            'np.take(G, g, axis=0, out=rows, mode="clip"); np.add(out, rows, out=out)',
            {**names, "out": out_array(point, dtype), "rows": out_array(point, dtype)},
            expected,
        ),
    ]


TORCH_SUM = "(F.embedding(t, T) + F.embedding(g, G)).add_(F.embedding(arange, P))"


def torch_names(torch: Any, tables: Tables, ids: Ids) -> dict[str, Any]:
    """Names of PyTorch's statements; its tensors share NumPy's memory."""
    torch.set_num_threads(1)
    return {
        "F": torch.nn.functional,
        "t": torch.from_numpy(ids.token),
        "g": torch.from_numpy(ids.segment),
        "arange": torch.arange(ids.token.shape[1]),
        **{name: torch.from_numpy(table) for name, table in zip("TPG", tables, strict=True)},
    }


def torch_sum_side(tables: Tables, ids: Ids) -> Side | Absent:
    """PyTorch's sum."""
    torch = installed("torch")
    if torch is None:
        return Absent("PyTorch", "torch is not installed")
    return Side(
        "PyTorch",
        TORCH_SUM,
        torch_names(torch, tables, ids),
        lambda: token_segment_position(tables, ids),
    )


def torch_norm_side(tables: Tables, ids: Ids, norm: Norm, tolerance: float) -> Side | Absent:
    """PyTorch's sum and LayerNorm."""
    torch = installed("torch")
    if torch is None:
        return Absent("PyTorch", "torch is not installed")
    return Side(
        "PyTorch",
        f"F.layer_norm({TORCH_SUM}, shape, weight, bias, eps)",
        {
            **torch_names(torch, tables, ids),
            "shape": norm.weight.shape,
            "weight": torch.from_numpy(norm.weight),
            "bias": torch.from_numpy(norm.bias),
            "eps": norm.eps,
        },
        lambda: normalised(token_segment_position(tables, ids), norm),
        tolerance,
    )


def onnx_side(
    point: Point,
    tables: Tables,
    ids: Ids,
    norm: Norm | None = None,
    tolerance: float = 0.0,
) -> Side | Absent:
    """ONNX Runtime's sum, or its fused float32 operator with LayerNorm."""
    onnx, runtime = installed("onnx"), installed("onnxruntime")
    if onnx is None or runtime is None:
        return Absent("ONNX Runtime", "onnx and onnxruntime are not both installed")
    make, kinds = onnx.helper, onnx.TensorProto
    dtype = tables[0].dtype
    kind = make.np_dtype_to_tensor_dtype(dtype)
    inputs = dict(zip("tg", ids, strict=True))
    initializers = dict(zip("TPG", tables, strict=True))
    constants = []
    if norm is not None:
        inputs = {name: array.astype(np.int32) for name, array in inputs.items()}
        initializers |= {"weight": norm.weight, "bias": norm.bias}
        nodes = [
            make.make_node(
                "EmbedLayerNormalization",
                ["t", "g", "T", "P", "G", "weight", "bias"],
                ["E", "mask_index"],
                domain="com.microsoft",
                epsilon=norm.eps,
            )
        ]
    else:
        constants = [
            onnx.numpy_helper.from_array(np.array([value], np.int64), name)
            for name, value in (("start", 0), ("S", point.length), ("axis", 0))
        ]
        nodes = [
            make.make_node("Gather", ["T", "t"], ["token_rows"]),
            make.make_node("Gather", ["G", "g"], ["segment_rows"]),
            make.make_node("Slice", ["P", "start", "S", "axis"], ["position_rows"]),
            make.make_node("Add", ["token_rows", "segment_rows"], ["partial"]),
            make.make_node("Add", ["partial", "position_rows"], ["E"]),
        ]
    for name, array in initializers.items():  # declared here, lent to the session below
        constants.append(kinds(name=name, data_type=kind, dims=array.shape))
        constants[-1].data_location = kinds.EXTERNAL
        constants[-1].external_data.add(key="location", value="memory")
    graph = make.make_graph(
        nodes,
        "embeddings",
        [
            make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in inputs.items()
        ],
        [make.make_tensor_value_info("E", kind, point)],
        constants,
    )
    domains = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(graph, opset_imports=domains, ir_version=8)

    lent = runtime.OrtValue.ortvalue_from_numpy
    tensors = {name: lent(array) for name, array in (initializers | inputs).items()}
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.add_external_initializers(list(initializers), [tensors[name] for name in initializers])
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    out = out_array(point, dtype)
    binding = session.io_binding()
    for name in inputs:
        binding.bind_ortvalue_input(name, tensors[name])
    tensors["E"] = lent(out)
    binding.bind_ortvalue_output("E", tensors["E"])

    def expected() -> Array:
        if norm is None:
            return token_segment_position(tables, ids)
        # the fused operator adds in the other order
        return normalised(token_position_segment(tables, ids, np.float32), norm)

    return Side(
        "ONNX Runtime",
        "session.run_with_iobinding(binding)",
        {
            "session": session,
            "binding": binding,
            "out": out,
            "lent": (tensors, initializers, inputs),  # the memory must outlive the session
        },
        expected,
        tolerance,
    )


def floor_sides(point: Point, tables: Tables, ids: Ids) -> Sides:
    """The layer's compiled part beside the C floor, into one array."""
    try:
        copy_rows = compiled_floor()
    except NoFloor as error:
        return [Absent(name, str(error)) for name in ("layer", "floor")]
    # With GCC's C library on AMD CPUs memcpy takes four times as long where its target lies 1 to 31
    # bytes beyond its source modulo the page, as numpy.empty may place it: rows and result at 64
    # bytes never meet that, and leave the floor at its best.
    out = aligned(point, np.float32)
    run = bertinput.BertEmbeddings(*tables)._stage.run
    return [
        Side(
            "layer",
            "run(token_ids, segment_ids, None, None, float32, out, 1, False, calls)",
            {**our_names(tables, ids), "run": run, "out": out, "calls": 1},
            lambda: token_segment_position(tables, ids),
            repeats=True,
        ),
        Side(
            "floor",
            "copy_rows(T, t, tokens, row_bytes, out_address, calls)",
            {
                "copy_rows": copy_rows,
                "T": tables.token.ctypes.data,
                "t": ids.token.ctypes.data,
                "tokens": ids.token.size,
                "row_bytes": tables.token.strides[0],
                "out_address": out.ctypes.data,
                "out": out,
                "calls": 1,
            },
            lambda: tables.token[ids.token],
            repeats=True,
        ),
    ]
