"""BERT's input-embedding stage: token, position and segment rows, their sum, LayerNorm."""

from bertinput import pool
from bertinput._build import build_info
from bertinput.functional import bert_embeddings
from bertinput.layers import BertEmbeddings, BERTStyleEmbedding
from bertinput.tables import QuantizedTable

__all__ = [
    "BERTStyleEmbedding",
    "BertEmbeddings",
    "QuantizedTable",
    "__version__",
    "bert_embeddings",
    "build_info",
    "pool",
]

__version__ = "0.1.0"
