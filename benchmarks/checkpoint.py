"""A checkpoint in a folder, written as Hugging Face's libraries write it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.workload import Norm, Tables

__all__ = ["write_checkpoint"]


def write_checkpoint(folder: Path, tables: Tables, norm: Norm) -> None:
    """Write ``config.json`` and ``model.safetensors`` of a BERT that is its input stage alone."""
    tensors = {
        "embeddings.LayerNorm.bias": norm.bias,
        "embeddings.LayerNorm.weight": norm.weight,
        "embeddings.position_embeddings.weight": tables.position,
        "embeddings.token_type_embeddings.weight": tables.segment,
        "embeddings.word_embeddings.weight": tables.token,
    }
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as those libraries pad it: tables do not start at 64 bytes
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor.tofile(file)
    config = {"model_type": "bert", "layer_norm_eps": norm.eps}
    (folder / "config.json").write_text(json.dumps(config))
