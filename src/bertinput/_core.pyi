from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

ROLE_NAMES: Final[tuple[str, ...]]
TYPE_NAMES: Final[tuple[str, ...]]

@disjoint_base
class Table:
    @property
    def values(self) -> NDArray[Any]: ...
    @property
    def given(self) -> NDArray[Any]: ...
    @property
    def type(self) -> int: ...
    def __init__(
        self,
        values: NDArray[Any],
        type: int,
        given: NDArray[Any],
        scale: NDArray[np.float32] | None = None,
        zero_point: NDArray[np.int32] | None = None,
    ) -> None: ...

@disjoint_base
class Norm:
    @property
    def weight(self) -> NDArray[np.float64]: ...
    @property
    def bias(self) -> NDArray[np.float64] | None: ...
    @property
    def eps(self) -> float: ...
    def __new__(
        cls,
        weight: NDArray[np.float64],
        bias: NDArray[np.float64] | None,
        vectors64: NDArray[np.float64],
        vectors32: NDArray[np.float32],
        eps: float,
    ) -> Norm: ...

@disjoint_base
class Stage:
    @property
    def token(self) -> Table: ...
    @property
    def position(self) -> Table | None: ...
    @property
    def segment(self) -> Table | None: ...
    @property
    def norm(self) -> Norm | None: ...
    @property
    def width(self) -> int: ...
    def __init__(
        self,
        token: Table,
        position: Table | None,
        segment: Table | None,
        order: tuple[int, ...],
        norm: Norm | None = None,
    ) -> None: ...
    @property
    def fits(self) -> bool: ...
    def run(
        self,
        token_ids: Any,
        segment_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        dtype: Any,
        out: Any,
        num_threads: Any,
        normalize: bool,
        calls: int = 1,
    ) -> NDArray[Any]: ...

def embed(
    token_ids: Any,
    segment_ids: Any,
    token_embeddings: Any,
    position_embeddings: Any,
    segment_embeddings: Any,
    position_ids: Any,
    dtype: Any,
    out: Any,
    num_threads: Any,
) -> NDArray[Any]: ...
def instruction_sets() -> list[str]: ...
def build_facts() -> dict[str, Any]: ...
def in_forked_child() -> bool: ...

POOL_MOST: Final[int]

def pool_limit() -> int: ...
def pool_held() -> int: ...
def pool_set_limit(limit: int) -> None: ...
def pool_trim() -> int: ...
