"""What differs from one model family to the next, written as data.

A family is a row of `FAMILIES`. The loader and the layer read the row and know no family by name:
another family is another row.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family", "family_named"]


@dataclass(frozen=True)
class Family:
    """A family of models whose input stage has the same names, order and defaults.

    Attributes
    ----------
    name : str
        ``model_type`` in ``config.json``.
    prefixes : tuple of str
        What may stand in front of the tensor names: the bare model, or one under a head.
    token, position, segment : str
        Tensor names of the tables; None where the family has no such table.
    layer_norm : str or None
        Name of the LayerNorm, to which ``.weight`` and ``.bias`` are added (``.gamma`` and
        ``.beta`` in old files).
    order : tuple of str
        The order in which the tables' rows are summed.
    eps_key, eps_default : str, float
        Where the configuration keeps LayerNorm's epsilon, and its value when it does not.
    token_key, position_key, segment_key, width_key : str
        Where the configuration keeps the rows of each table, and the width of all.
    """

    name: str
    prefixes: tuple[str, ...]
    token: str
    position: str | None
    segment: str | None
    layer_norm: str | None
    order: tuple[str, ...]
    eps_key: str
    eps_default: float
    token_key: str = "vocab_size"
    position_key: str = "max_position_embeddings"
    segment_key: str = "type_vocab_size"
    width_key: str = "hidden_size"


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="bert",
            prefixes=("", "bert."),
            token="embeddings.word_embeddings.weight",
            position="embeddings.position_embeddings.weight",
            segment="embeddings.token_type_embeddings.weight",
            layer_norm="embeddings.LayerNorm",
            order=("token", "segment", "position"),
            eps_key="layer_norm_eps",
            eps_default=1e-12,
        ),
    )
}


def family_named(name: object) -> Family:
    """The family whose ``model_type`` is `name`; ValueError, listing those known, if none is."""
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return family
