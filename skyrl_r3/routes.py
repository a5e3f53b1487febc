"""Routes of one trajectory, together with the tokens that they belong to.

SkyRL 0.3's generator treats routes as lists: it asks for their truth value, slices them and appends a row of zeros
for an end-of-sequence token that the engine did not sample. :class:`RoutedExperts` answers to exactly that over an
array, so that the generator needs no patch for it, and an ``if routes:`` does not meet numpy's ``ValueError: truth
value of an array is ambiguous``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from skyrl_r3 import codec
from skyrl_r3.errors import RouteError, describe

__all__ = ["RoutedExperts", "as_token_array"]


class RoutedExperts:
    """Expert ids of the captured tokens of one trajectory: row ``i`` is the route of token ``i``.

    The tokens are kept beside the ids (4 bytes a row, against 384 for 48 layers of top-8), because that is the only
    way to see that routes are still with the trajectory they were captured from when they become a tensor.

    Attributes:
        ids: ``[rows, layers, topk]``, uint8, int16 or int32, C-contiguous rows.
        token_ids: ``[rows]`` int32, the tokens that were fed to the model for these rows.

    Raises:
        CodecError: ``ids`` is not such an array, or has a negative id. Checked here once; later stages trust it.
        RouteError: ``ids`` and ``token_ids`` differ in their number of rows.
    """

    __slots__ = ("ids", "token_ids")

    def __init__(self, ids: np.ndarray, token_ids: np.ndarray) -> None:
        codec.check(ids)
        if len(ids) != len(token_ids):
            raise RouteError("routed_experts.token_ids", expected=f"{len(ids)} tokens", got=str(len(token_ids)))
        self.ids: np.ndarray = ids
        self.token_ids: np.ndarray = token_ids

    @classmethod
    def of_checked(cls, ids: np.ndarray, token_ids: np.ndarray) -> RoutedExperts:
        """As the constructor, without its checks: for ids that the codec has decoded, and as many tokens."""
        made = object.__new__(cls)
        made.ids, made.token_ids = ids, token_ids
        return made

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.ids)

    @overload
    def __getitem__(self, index: slice) -> RoutedExperts: ...

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    def __getitem__(self, index: slice | int) -> RoutedExperts | np.ndarray:
        """Rows of a slice with their tokens (a view), or the ids ``[layers, topk]`` of one row."""
        if isinstance(index, slice):
            return RoutedExperts.of_checked(self.ids[index], self.token_ids[index])
        return self.ids[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.ids, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"RoutedExperts({describe(self.ids)})"

    def append(self, row: Any) -> None:
        """Take note of a token that was never fed to the model, such as a synthetic end-of-sequence token.

        It has no route, so nothing is stored: preprocessing fills every row that was not captured and marks it as
        padding.

        Raises:
            RouteError: ``row`` is not all zeros and would be lost.
        """
        if np.any(row):
            raise RouteError("routed_experts", expected="a placeholder row of zeros", got="a row with expert ids")

    def common_prefix(self, token_ids: np.ndarray) -> int:
        """How many of the leading rows belong to ``token_ids`` ``[tokens]``."""
        size = min(len(self.token_ids), len(token_ids))
        different = np.flatnonzero(self.token_ids[:size] != token_ids[:size])
        return int(different[0]) if len(different) else size


def as_token_array(token_ids: Sequence[int], field: str = "token_ids") -> np.ndarray:
    """``token_ids`` as int32 ``[tokens]``. Through ``array`` because that is 4 times as fast as numpy on a list.

    Raises:
        RouteError: Something in it is not an integer of 32 bits.
    """
    try:
        # `array` would take the memory of a bytes object for the integers, and True for 1.
        if isinstance(token_ids, bytes | bytearray) or {bool, np.bool_} & set(map(type, token_ids)):
            raise TypeError("not all of them are integers")
        return np.frombuffer(array("i", token_ids), dtype=np.int32)
    except (TypeError, OverflowError) as error:
        raise RouteError(field, expected="a list of token ids", got=f"{describe(token_ids)}: {error}") from error
