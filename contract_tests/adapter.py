"""What an implementation has to look like to be tested.

Derive from :class:`Adapter`, write ``encode`` and ``decode``, and run ``pytest contract_tests --impl
package.module:Class``. What else an implementation can do it says in :class:`Quirks`; only that is tested.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

NESTED, PACKED, FRAME = ENCODINGS = ("nested", "packed", "frame/1")


LONGEST_ERROR = 2_000
"""Characters that the text of a refusal stays below: it is written to every log, and may quote what was given."""


@dataclass(frozen=True)
class Quirks:
    """What an implementation can do, and where it is known to take more than the contract allows.

    Attributes:
        form: What ``encode`` gives and ``decode`` takes: the packed envelope, or nested lists.
        writes: Encodings of whole replies that ``dump`` writes.
        reads: Those that ``load`` reads.
        tensors: ``encode`` takes torch tensors.
        trace: ``trace`` puts the turns of a trajectory together. "whole": each turn has the rows of its whole prompt;
            "deltas": only those that the turns before do not have.
        cut: ``cut`` shortens routes.
        http: There is an :class:`Http`.
        max_bytes: The largest array that ``decode`` makes.
        lenient: Violations, by their names in :mod:`contract_tests.oracle`, that ``decode`` lets pass, so that what is
            corrupted by chance may have them. A test of just that violation needs an entry in ``expected.toml``.
    """

    form: str = PACKED
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    tensors: bool = False
    trace: str = ""
    cut: bool = False
    http: bool = False
    max_bytes: int = 2**31
    lenient: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse what would quietly leave tests out, or never come true.

        Raises:
            ValueError: One of them is not what the class says.
        """
        known = ", ".join(ENCODINGS)
        for name in ("writes", "reads"):
            given: Any = getattr(self, name)
            right = isinstance(given, tuple) and all(encoding in ENCODINGS for encoding in given)
            _check(name, given, right, f"a tuple of {known}")
        for name in ("tensors", "cut", "http"):
            _check(name, getattr(self, name), type(getattr(self, name)) is bool, "a bool")
        _check("form", self.form, self.form in (PACKED, NESTED), f"{PACKED} or {NESTED}")
        _check("trace", self.trace, self.trace in ("", "whole", "deltas"), "whole, deltas or nothing")
        _check("max_bytes", self.max_bytes, type(self.max_bytes) is int and self.max_bytes > 0, "an int above 0")
        names = isinstance(self.lenient, frozenset) and all(isinstance(name, str) for name in self.lenient)
        _check("lenient", self.lenient, names, "a frozenset of names")

    @property
    def capabilities(self) -> frozenset[str]:
        """The names that ``@pytest.mark.capability`` uses."""
        flags = {name for name in ("tensors", "trace", "cut", "http") if getattr(self, name)}
        bodies = {f"{verb} {name}" for verb in ("writes", "reads") for name in getattr(self, verb)}
        return frozenset({self.form, *bodies, *flags, *(["bodies"] if bodies else [])})


def _check(name: str, given: Any, right: bool, expected: str) -> None:
    if not right:
        raise ValueError(f"quirks.{name}: expected {expected}, got {given!r}")


@dataclass(frozen=True, eq=False)
class Reply:
    """A reply of the inference server.

    Attributes:
        routes: ``[rows, layers, topk]``, None where the reply has none.
        metadata: What only a frame can tell: ``prompt_tokens``, ``start``, ``num_experts``, ``layers``, ``moe_layers``
            (a tuple, ascending), ``model``. What is unknown is not in it. A frame's ``topk`` is that of the routes.
    """

    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    routes: Array | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Turn:
    """One generation of a trajectory. ``rows`` are those of ``prompt + response - 1`` from row ``start`` on."""

    prompt: list[int]
    response: list[int]
    start: int
    rows: Array


class Adapter:
    """An implementation under test.

    Attributes:
        refusals: The exceptions that its documentation names for input that is wrong. Any other is a fault.
    """

    name = ""
    quirks: ClassVar[Quirks] = Quirks()
    refusals: tuple[type[Exception], ...] | type[Exception] = ValueError

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}()"

    def versions(self) -> dict[str, str]:
        """What is under test, for the header of a run: names and versions."""
        return {}

    def encode(self, ids: Any) -> Any:
        """Routes ``[rows, layers, topk]`` as they go into JSON: the packed envelope or nested lists."""
        raise NotImplementedError

    def decode(self, payload: Any) -> Array:
        """What ``encode`` made, as an array. ``payload`` is what came out of a JSON parser, and may be anything."""
        raise NotImplementedError

    def dump(self, reply: Reply, encoding: str) -> bytes:
        """A whole body, for each of ``quirks.writes``."""
        raise NotImplementedError

    def load(self, body: bytes) -> Reply:
        """The reply in a body of any of ``quirks.reads``. ``body`` came over the network, and may be anything."""
        raise NotImplementedError

    def trace(self, turns: Sequence[Turn]) -> Array:
        """The routes of a whole trajectory, for ``quirks.trace``."""
        raise NotImplementedError

    def cut(self, ids: Array, rows: int) -> Array:
        """The first ``rows`` rows of ``ids``, for ``quirks.cut``."""
        raise NotImplementedError

    def http(self) -> Http:
        """The endpoint and the client, for ``quirks.http``."""
        raise NotImplementedError


class Http(Protocol):
    """An inference server and a client of it.

    Attributes:
        read_only: Encodings whose routes the client documents to be read-only.
    """

    read_only: tuple[str, ...]

    def encodings(self) -> tuple[str, ...]:
        """What its client understands of :data:`NESTED`, :data:`PACKED` and :data:`FRAME`."""
        ...

    def app(self, engine: Any) -> Any:
        """An ASGI application with the generate endpoint, on an engine that has vLLM's ``generate``."""
        ...

    def client(self, address: str) -> AbstractAsyncContextManager[Client]:
        """A client of the server at ``address``, such as ``http://127.0.0.1:8000``, with no pauses between attempts.

        It posts ``token_ids`` and ``sampling_params`` as JSON, to any path, and what follows ends with the context.
        """
        ...


class Client(Protocol):
    async def generate(self, prompt_token_ids: list[int], *, logprobs: bool = False) -> Reply:
        """Ask for one sample with its routes."""
        ...


NAMES = {
    "overlay": "contract_tests.implementations:Overlay",
    "skyrl": "contract_tests.implementations:SkyRL",
    "naive": "contract_tests.implementations:Naive",
}
"""What ``--impl`` takes beside ``package.module:Class``."""


class UnknownImplementationError(Exception):
    """``--impl`` names nothing that can be tested here."""


def short(name: str) -> str:
    """The one name under which an implementation is known, of the two that some have."""
    return next((known for known, path in NAMES.items() if path == name), name)


def load(name: str) -> Adapter:
    """The implementation that ``--impl`` names.

    Raises:
        UnknownImplementationError: There is none of that name, or it cannot be imported here, or it says of itself
            what cannot be.
    """
    path = NAMES.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise UnknownImplementationError(f"{name}: expected {', '.join(NAMES)} or package.module:Class")
    try:
        made = getattr(importlib.import_module(module), attribute)()
        wrong = _wrong(made)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Modules that call sys.exit() or pytest.skip() are met in the wild.
        searched = " (searched the current folder and PYTHONPATH)" if isinstance(error, ModuleNotFoundError) else ""
        raise UnknownImplementationError(f"{name}: {type(error).__name__}: {error}{searched}") from error
    if wrong:
        raise UnknownImplementationError(f"{name}: expected {wrong}")
    made.name = short(name)
    return made


def _wrong(made: Any) -> str:
    """What was expected of an adapter, and what it has instead. Empty: it can be tested."""
    if not isinstance(made, Adapter):
        return f"an Adapter, got {made!r}"
    quirks: Any = made.quirks
    if not isinstance(quirks, Quirks):
        return f"quirks to be Quirks, got {quirks!r}"
    needed = {"dump": quirks.writes, "load": quirks.reads, "trace": quirks.trace, "cut": quirks.cut}
    for method, claim in {"encode": True, "decode": True, **needed, "http": quirks.http}.items():
        if claim and getattr(type(made), method) is getattr(Adapter, method):
            return f"an Adapter with {method}(), got {made!r}" + ("" if claim is True else f" with {claim!r} in quirks")
    refusals: Any = made.refusals if isinstance(made.refusals, tuple) else (made.refusals,)
    classes = all(isinstance(kind, type) and issubclass(kind, Exception) for kind in refusals)
    if not refusals or not classes or Exception in refusals:
        # Whatever goes wrong in a codec would be a refusal.
        return f"refusals to be exceptions narrower than Exception, got {made.refusals!r}"
    versions: Any = made.versions()
    if not isinstance(versions, dict) or not all(isinstance(text, str) for pair in versions.items() for text in pair):
        return f"versions() to be a dict of str, got {versions!r}"
    return ""
