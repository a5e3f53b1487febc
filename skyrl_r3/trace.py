"""Routes of one trajectory across its turns.

The prompt of a turn begins with all that was there before, so that an engine that returns the routes of the whole
prompt sends every row again at each turn: bytes grow with the square of the turns. A :class:`Trace` keeps the rows that
arrived, and says from which token on the next turn needs some.

The first capture of a row wins: it is the one that the token behind it was sampled with. An engine that computes a
prompt again may route it otherwise, if only by rounding: in a trajectory of 50 turns and 3,464 rows that vLLM 0.30.0
generated on a CPU, 142. A row that the policy has masked stays so.
"""

from __future__ import annotations

from contextvars import ContextVar

import numpy as np

from skyrl_r3.routes import RoutedExperts

__all__ = ["Trace", "Traces", "trajectory"]

_SPARE = 1.25
"""Times the rows that are needed: so that a turn copies its own rows, and only now and then those of all others."""


class Trace:
    """What a trajectory holds. It lives as long as the trajectory is generated, and is freed with it."""

    def __init__(self) -> None:
        self._held: RoutedExperts | None = None
        self._buffer = np.empty((0, 0, 0), dtype=np.uint8)
        self._used = 0

    def held_for(self, prompt: np.ndarray) -> RoutedExperts | None:
        """The rows that need not be sent again for ``prompt`` int32 ``[tokens]``.

        None if there are none, or if they are not those of its first tokens: then all of them are asked for. The row of
        the last prompt token always is: with nothing of the prompt to return, vLLM before 0.30.0 dies.
        """
        if self._held is None or self._held.common_prefix(prompt) < len(self._held):
            return None
        return self._held[: len(prompt) - 1] or None

    def add(self, held: RoutedExperts | None, ids: np.ndarray, token_ids: np.ndarray) -> RoutedExperts:
        """Put a turn's rows behind those that were held when it was asked for.

        Args:
            held: What :meth:`held_for` returned.
            ids: The rows that follow it, ``[rows, layers, topk]``, of the same layers and top-k.
            token_ids: The tokens of both, int32.

        Returns:
            The routes of all of them. They share the trace's memory, which is never written there again.
        """
        # As it came, at first. Nothing is copied for a trajectory of one turn.
        merged = ids if held is None else self._appended(held.ids, ids)
        self._held = RoutedExperts.of_checked(merged, token_ids)
        return self._held

    def _appended(self, held: np.ndarray, ids: np.ndarray) -> np.ndarray:
        rows = len(held) + len(ids)
        dtype = max(held.dtype, ids.dtype, key=lambda dtype: dtype.itemsize)
        # Two requests at once may both follow the same rows. The second finds the rows behind them in use.
        ours = held.base is self._buffer and len(held) == self._used
        if not ours or rows > len(self._buffer) or dtype != self._buffer.dtype:
            self._buffer = np.empty((int(rows * _SPARE), *ids.shape[1:]), dtype=dtype)
            self._buffer[: len(held)] = held
        self._buffer[len(held) : rows] = ids
        self._used = rows
        return self._buffer[:rows]


class Traces(dict[tuple[str, str], Trace]):
    """Of one trajectory, by address and model: an environment may ask others about the same tokens."""

    def __missing__(self, key: tuple[str, str]) -> Trace:
        return self.setdefault(key, Trace())


trajectory: ContextVar[Traces | None] = ContextVar("skyrl_r3_trajectory", default=None)
"""The traces of the trajectory that is being generated; None outside of SkyRL's agent loop."""
