"""The implementations that the suite knows by name."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from contract_tests.adapter import FRAME, NESTED, PACKED, Adapter, Array, Http, Quirks, Reply, Turn

UNCHECKED = ("token_ids", "finish_reason", "logprobs")
"""Fields beside the routes that are passed on as they come."""


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "a checkout"
    return found


def _json(reply: Reply, routes: Any) -> bytes:
    """The JSON that SkyRL's server writes."""
    content = None if reply.logprobs is None else {"content": [{"logprob": value} for value in reply.logprobs]}
    choice = {"token_ids": reply.token_ids, "finish_reason": reply.finish_reason, "logprobs": content}
    return orjson.dumps({"choices": [choice | {"routed_experts": routes}]})


def _reply(parsed: Any, decode: Callable[[Any], Array]) -> Reply:
    """What SkyRL's client takes from it, unchecked but for the routes."""
    try:
        choice = parsed["choices"][0]
        token_ids, reason, logprobs = choice["token_ids"], choice["finish_reason"], choice.get("logprobs")
        values = None if logprobs is None else [entry["logprob"] for entry in logprobs["content"]]
        routes = choice["routed_experts"]
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"no reply: {error!r}") from error
    if token_ids and not values:
        values = None  # That client asks for the truth of the list.
    return Reply(token_ids, reason, values, None if routes is None else decode(routes))


class Overlay(Adapter):
    """skyrl-r3 itself."""

    quirks = Quirks(
        writes=(PACKED, FRAME), reads=(NESTED, PACKED, FRAME), tensors=True, trace="whole", cut=True, http=True
    )

    def __init__(self) -> None:
        from skyrl_r3.errors import R3Error

        self.refusals = R3Error

    def versions(self) -> dict[str, str]:
        return _versions("skyrl-r3")

    def encode(self, ids: Any) -> Any:
        from skyrl_r3 import codec

        return codec.pack(ids)

    def decode(self, payload: Any) -> Array:
        from skyrl_r3 import codec

        return codec.unpack(payload)

    def dump(self, reply: Reply, encoding: str) -> bytes:
        from skyrl_r3 import frame, packed
        from skyrl_r3 import reply as replies
        from skyrl_r3.spec import RouteSpec

        told = dict(reply.metadata)
        spec = {name: told.pop(name) for name in ("num_experts", "layers", "moe_layers") if name in told}
        if reply.routes is not None:
            spec["topk"] = np.shape(reply.routes)[-1]
        made = replies.Reply(
            token_ids=np.array(reply.token_ids, np.int32),
            finish_reason=reply.finish_reason,
            logprobs=None if reply.logprobs is None else np.array(reply.logprobs, np.float64),
            routed_experts=reply.routes,
            spec=RouteSpec(**spec),
            **told,
        )
        return frame.dump(made) if encoding == FRAME else packed.dump(made)

    def load(self, body: bytes) -> Reply:
        from skyrl_r3 import wire

        found, _ = wire.load(body)
        told = {name: getattr(found, name) for name in ("prompt_tokens", "start", "model")}
        told |= {name: getattr(found.spec, name) for name in ("num_experts", "layers", "moe_layers")}
        return Reply(
            token_ids=found.token_ids.tolist(),
            finish_reason=found.finish_reason,
            logprobs=None if found.logprobs is None else found.logprobs.tolist(),
            routes=found.routed_experts,
            metadata={name: value for name, value in told.items() if value not in (None, "")},
        )

    def trace(self, turns: Sequence[Turn]) -> Array:
        from skyrl_r3.routes import RoutedExperts, as_token_array

        last = turns[-1]
        tokens = as_token_array([*last.prompt, *last.response][:-1])
        return np.asarray(RoutedExperts(last.rows, tokens))

    def cut(self, ids: Array, rows: int) -> Array:
        from skyrl_r3.routes import RoutedExperts

        return RoutedExperts(ids, np.arange(len(ids), dtype=np.int32))[:rows].ids

    def http(self) -> Http:
        from contract_tests.http.implementations import OverlayHttp

        return OverlayHttp()


class SkyRL(Adapter):
    """The codec and the trace of SkyRL 0.4.0, as it ships them.

    Its codec documents TypeError and ValueError. What it reads of a reply beside the routes is not the codec's work,
    and is done here as its client does it.
    """

    quirks = Quirks(
        writes=(PACKED,),
        reads=(PACKED,),
        tensors=True,
        trace="deltas",
        http=True,
        lenient=frozenset(
            {"extra keys", "keys twice", "pad bits", "too large", "shape container", "shape numpy", *UNCHECKED}
        ),
    )
    refusals = (TypeError, ValueError)

    def __init__(self) -> None:
        package = "skyrl.backends.skyrl_train"
        self._wire: Any = importlib.import_module(f"{package}.inference_servers.generate_wire")
        self._trace: Any = importlib.import_module(f"{package}.utils.routed_experts").RoutedExpertTrace

    def versions(self) -> dict[str, str]:
        return _versions("skyrl")

    def encode(self, ids: Any) -> Any:
        return self._wire.pack_routed_experts(ids)

    def decode(self, payload: Any) -> Array:
        return self._wire.decode_packed_routed_experts(payload)

    def dump(self, reply: Reply, encoding: str) -> bytes:
        return _json(reply, None if reply.routes is None else self.encode(reply.routes))

    def load(self, body: bytes) -> Reply:
        return _reply(self._wire.load_packed_body(body), self.decode)

    def trace(self, turns: Sequence[Turn]) -> Array:
        trace = self._trace()
        for turn in turns:
            counts = {"prompt_token_count": len(turn.prompt), "generated_token_count": len(turn.response)}
            trace.record_generation(routed_experts=turn.rows, **counts)
        last = turns[-1]
        return trace.finalize(
            token_count=len(last.prompt) + len(last.response),
            loss_mask=[0] * len(last.prompt) + [1] * len(last.response),
        )

    def http(self) -> Http:
        from contract_tests.http.implementations import SkyRLHttp

        return SkyRLHttp()


class Naive(Adapter):
    """Nested lists, as SkyRL 0.3 sends them, written without a thought for speed. The oracle of the others."""

    quirks = Quirks(
        form=NESTED, writes=(NESTED,), reads=(NESTED,), tensors=True, cut=True, lenient=frozenset(UNCHECKED)
    )
    refusals = (TypeError, ValueError)

    def versions(self) -> dict[str, str]:
        return _versions("numpy")

    def encode(self, ids: Any) -> Any:
        lists = ids.tolist() if hasattr(ids, "tolist") else ids
        self.decode(lists)
        return lists

    def decode(self, payload: Any) -> Array:
        if type(payload) is not list:
            raise TypeError(f"expected a list of rows, got {type(payload).__name__}")
        shape = (len(payload), 0, 0)
        for row in payload:
            if type(row) is not list:
                raise TypeError(f"expected a list of layers, got {type(row).__name__}")
            for layer in row:
                if type(layer) is not list:
                    raise TypeError(f"expected a list of ids, got {type(layer).__name__}")
                for number in layer:
                    if type(number) is not int:
                        raise TypeError(f"expected an id, got {type(number).__name__}")
                    if not 0 <= number < 2**31:
                        raise ValueError(f"expected an id below 2**31, got one of {number.bit_length()} bits")
            shape = (len(payload), len(row), len(row[0]) if row else 0)
        if any(len(row) != shape[1] or any(len(layer) != shape[2] for layer in row) for row in payload):
            raise ValueError("expected rows of one shape")
        if payload and not (shape[1] and shape[2]):
            raise ValueError("expected ids in the rows")
        largest = max((number for row in payload for layer in row for number in layer), default=0)
        dtype = np.uint8 if largest < 2**8 else np.int16 if largest < 2**15 else np.int32
        return np.array(payload, dtype).reshape(shape)

    def dump(self, reply: Reply, encoding: str) -> bytes:
        return _json(reply, None if reply.routes is None else self.encode(reply.routes))

    def load(self, body: bytes) -> Reply:
        return _reply(orjson.loads(body), self.decode)

    def cut(self, ids: Array, rows: int) -> Array:
        return self.decode(ids.tolist()[:rows])
