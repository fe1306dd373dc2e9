"""Who is timed. A side is one statement: the text that the report prints is the text that runs.

All sides read the same tables in the same memory, 64-byte aligned, and ids of int64 that were
prepared in advance (ONNX Runtime's fused operator takes only int32, so it gets those). All run on
one thread. Each is held to a plain NumPy computation before it is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bertinput
from benchmarks.workload import Ids, Norm, Point, Tables, draw_norm, draw_tables

__all__ = ["GROUPS", "NOTES", "Side", "check", "installed"]

Array = NDArray[Any]

OURS_TOLERANCE = 2e-6  # what the package promises for LayerNorm
PEER_TOLERANCE = 1e-5  # enough to tell a right LayerNorm from a wrong one

NOTES = {
    "bertinput": "num_threads=1. out is a plain numpy.empty array, kept; without out= the result "
    "is new and dropped each time.",
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
}


@dataclass(frozen=True)
class Side:
    """A statement, the names in it, and what it must compute.

    A side that writes into a kept array calls that array `out`. `tolerance` is relative to the
    largest element of each row; 0 asks for the same type and bits.
    """

    name: str
    statement: str
    names: dict[str, Any]
    expected: Callable[[], Array]
    tolerance: float = 0.0


def installed(name: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def check(side: Side) -> float:
    """Run a side once and return its largest error; ArithmeticError if beyond its tolerance."""
    out = side.names.get("out")
    if out is None:
        actual = np.asarray(eval(side.statement, side.names))
    else:
        out.fill(np.nan)
        exec(side.statement, side.names)
        actual = out
    expected = side.expected()
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


def out_array(point: Point, dtype: type[np.floating[Any]]) -> Array:
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


def numpy_sides(point: Point, tables: Tables, ids: Ids, fresh: bool) -> list[Side]:
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


def torch_sum_side(tables: Tables, ids: Ids) -> list[Side]:
    """PyTorch's sum, if it is installed."""
    torch = installed("torch")
    if torch is None:
        return []
    return [
        Side(
            "PyTorch",
            TORCH_SUM,
            torch_names(torch, tables, ids),
            lambda: token_segment_position(tables, ids),
        )
    ]


def onnx_side(point: Point, tables: Tables, ids: Ids, norm: Norm | None = None) -> list[Side]:
    """ONNX Runtime's sum, or its fused float32 operator with LayerNorm, if it is installed."""
    onnx, runtime = installed("onnx"), installed("onnxruntime")
    if onnx is None or runtime is None:
        return []
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

    return [
        Side(
            "ONNX Runtime",
            "session.run_with_iobinding(binding)",
            {
                "session": session,
                "binding": binding,
                "out": out,
                "lent": (tensors, initializers, inputs),  # the memory must outlive the session
            },
            expected,
            0.0 if norm is None else PEER_TOLERANCE,
        )
    ]


# ---- groups: sides that take turns in one process ----


def float32_sides(point: Point, ids: Ids, fresh: bool, quick: bool) -> list[Side]:
    """The float32 sum, into a kept array."""
    tables = draw_tables(point.width, np.float32, quick)
    names = our_names(tables, ids)
    sides = [
        Side(
            "layer",
            "layer.sum(token_ids, segment_ids, dtype=float32, out=out, num_threads=1)",
            {
                **names,
                "layer": bertinput.BertEmbeddings(*tables),
                "out": out_array(point, np.float32),
            },
            lambda: token_segment_position(tables, ids),
        ),
        Side(
            "function",
            "bert_embeddings(token_ids, segment_ids, T, P, G, dtype=float32, out=out, "
            "num_threads=1)",
            {**names, "out": out_array(point, np.float32)},
            lambda: token_position_segment(tables, ids, np.float32),
        ),
        *numpy_sides(point, tables, ids, fresh),
    ]
    return sides if fresh else sides + torch_sum_side(tables, ids) + onnx_side(point, tables, ids)


def float64_sides(point: Point, ids: Ids, fresh: bool, quick: bool) -> list[Side]:
    """The float64 sum by the seed's own call, of float64 and of float32 tables; new results."""
    tables = draw_tables(point.width, np.float64, quick)
    narrow = draw_tables(point.width, np.float32, quick)
    statement = "bert_embeddings(token_ids, segment_ids, T, P, G, num_threads=1)"
    sides = [
        Side(
            "function",
            statement,
            our_names(tables, ids),
            lambda: token_position_segment(tables, ids, np.float64),
        ),
        Side(
            "function, float32 tables",
            statement,
            our_names(narrow, ids),
            lambda: token_position_segment(narrow, ids, np.float64),
        ),
        *numpy_sides(point, tables, ids, fresh),
    ]
    return sides if fresh else sides + torch_sum_side(tables, ids) + onnx_side(point, tables, ids)


def layernorm_sides(point: Point, ids: Ids, fresh: bool, quick: bool) -> list[Side]:
    """The float32 sum and its LayerNorm beside PyTorch and ONNX Runtime."""
    tables, norm = draw_tables(point.width, np.float32, quick), draw_norm(point.width)

    def expected() -> Array:
        return normalised(token_segment_position(tables, ids), norm)

    sides = [
        Side(
            "layer",
            "layer(token_ids, segment_ids, dtype=float32, out=out, num_threads=1)",
            {
                **our_names(tables, ids),
                "layer": bertinput.BertEmbeddings(*tables, layer_norm=norm),
                "out": out_array(point, np.float32),
            },
            expected,
            OURS_TOLERANCE,
        )
    ]
    torch = installed("torch")
    if torch is not None:
        sides.append(
            Side(
                "PyTorch",
                f"F.layer_norm({TORCH_SUM}, shape, weight, bias, eps)",
                {
                    **torch_names(torch, tables, ids),
                    "shape": (point.width,),
                    "weight": torch.from_numpy(norm.weight),
                    "bias": torch.from_numpy(norm.bias),
                    "eps": norm.eps,
                },
                expected,
                PEER_TOLERANCE,
            )
        )
    return sides + onnx_side(point, tables, ids, norm)


@dataclass(frozen=True)
class Group:
    """Sides that take turns, and whether that is in a process which has freed nothing large."""

    sides: Callable[[Point, Ids, bool, bool], list[Side]]
    fresh: bool = False


GROUPS = {
    "float32 sum": Group(float32_sides),
    "float32 sum, fresh": Group(float32_sides, fresh=True),
    "float64 sum": Group(float64_sides),
    "float64 sum, fresh": Group(float64_sides, fresh=True),
    "float32 sum + LayerNorm": Group(layernorm_sides),
}
