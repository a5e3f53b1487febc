"""Implementations with a bug each, and the test that has to catch it.

``meta/test_planted.py`` runs that test against each of them; ``python -m contract_tests.planted`` does so, too, with
those of the HTTP part, and prints which test caught which.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import pybase64

from contract_tests import oracle
from contract_tests.adapter import FRAME, Array, Reply, Turn
from contract_tests.child import finish
from contract_tests.implementations import Overlay
from contract_tests.parts import HERE
from skyrl_r3.errors import R3Error


class Planted(Overlay):
    """Base of them. The docstring of each says what is wrong with it.

    Attributes:
        caught_by: The test that has to fail for it.
    """

    caught_by: ClassVar[str]

    def encode_raw(self, ids: Array, dtype: str, order: Any = "C") -> dict[str, Any]:
        """An envelope of whatever bytes ``ids`` have in ``dtype``."""
        raw = ids.astype(dtype).tobytes(order=order)
        return {"data": base64.b64encode(raw).decode(), "shape": list(ids.shape), "dtype": dtype}


def _array(ids: Any) -> Array:
    return ids.numpy() if hasattr(ids, "numpy") else np.asarray(ids)


# Encoding.


class DtypeOffByOne(Planted):
    """256 experts and the id 256 still go into a uint8."""

    caught_by = "codec/test_dtypes.py::test_smallest_dtype[256]"

    def encode(self, ids: Any) -> Any:
        right = super().encode(ids)
        return self.encode_raw(_array(ids), "uint8") if _array(ids).max(initial=0) == 256 else right


class Wraps(Planted):
    """Negative ids become large ones."""

    caught_by = "codec/test_dtypes.py::test_negative_ids[-1]"

    def encode(self, ids: Any) -> Any:
        return super().encode(_array(ids) & 0xFF if isinstance(ids, np.ndarray) and ids.dtype.kind == "i" else ids)


class CutsOff(Planted):
    """Ids beyond int32 lose their upper bits."""

    caught_by = "codec/test_dtypes.py::test_ids_beyond_int32[4294967301]"

    def encode(self, ids: Any) -> Any:
        wide = isinstance(ids, np.ndarray) and ids.dtype.itemsize == 8 and ids.dtype.kind in "iu"
        return super().encode(ids.astype(np.uint32).astype(np.int64) if wide else ids)


class LastRowDropped(Planted):
    """Somebody counted one token too few."""

    caught_by = "codec/test_round_trip.py::test_shapes[300-5x1x8]"

    def encode(self, ids: Any) -> Any:
        return super().encode(ids[:-1] if isinstance(ids, np.ndarray) and len(ids) > 1 else ids)


class RowsShifted(Planted):
    """Each row is the one of the token before."""

    caught_by = "codec/test_golden.py::test_golden_envelopes_are_written[v1-uint8]"

    def encode(self, ids: Any) -> Any:
        return super().encode(np.roll(ids, 1, axis=0) if isinstance(ids, np.ndarray) and ids.ndim == 3 else ids)


class MemoryOrder(Planted):
    """An array is written in the order that it has in memory."""

    caught_by = "codec/test_round_trip.py::test_layouts[255-fortran]"

    def encode(self, ids: Any) -> Any:
        right = super().encode(ids)
        return self.encode_raw(_array(ids), right["dtype"], order="A")


class BigEndian(Planted):
    """The bytes of a big-endian array are taken as they are."""

    caught_by = "codec/test_round_trip.py::test_layouts[383-big_endian]"

    def encode(self, ids: Any) -> Any:
        if isinstance(ids, np.ndarray) and ids.dtype.byteorder == ">" and ids.itemsize == 2:
            right = super().encode(ids)
            return right | {"data": base64.b64encode(ids.tobytes()).decode()}
        return super().encode(ids)


class WritesItsInput(Planted):
    """The engine's own array is sorted on the way."""

    caught_by = "codec/test_round_trip.py::test_encoding_leaves_its_input_alone"

    def encode(self, ids: Any) -> Any:
        right = super().encode(ids)
        if isinstance(ids, np.ndarray) and ids.flags.writeable:
            ids[...] = np.sort(ids, axis=-1)
        return right


class StaleBuffer(Planted):
    """The envelope is made of the array's memory when it is read, not when it is asked for."""

    caught_by = "codec/test_round_trip.py::test_encoding_takes_a_copy"

    def encode(self, ids: Any) -> Any:
        def data() -> str:
            return Overlay.encode(self, ids)["data"]

        class Late(dict[str, Any]):
            def __getitem__(self, key: str) -> Any:
                return data() if key == "data" else super().__getitem__(key)

        return Late(super().encode(ids))


class RemembersTheArray(Planted):
    """An array that was encoded once is not looked at again, although the engine has written it anew."""

    caught_by = "codec/test_round_trip.py::test_encoding_again"

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Any, Any] = (None, None)

    def encode(self, ids: Any) -> Any:
        if self._last[0] is not ids:
            self._last = (ids, super().encode(ids))
        return self._last[1]


class SmallDimensions(Planted):
    """More than 127 layers are cut off."""

    caught_by = "codec/test_round_trip.py::test_shapes[300-2x130x3]"

    def encode(self, ids: Any) -> Any:
        return super().encode(ids[:, :127] if isinstance(ids, np.ndarray) and ids.ndim == 3 else ids)


class KeyOrder(Planted):
    """The dtype comes first, which a reader that scans for data does not expect."""

    caught_by = "codec/test_golden.py::test_golden_envelopes_are_written[v1-int16]"

    def encode(self, ids: Any) -> Any:
        return dict(reversed(super().encode(ids).items()))


class NoShapeWithoutRows(Planted):
    """Routes without rows lose their layers."""

    caught_by = "codec/test_round_trip.py::test_no_rows[0x48x8]"

    def encode(self, ids: Any) -> Any:
        right = super().encode(ids)
        return right if right["shape"][0] else right | {"shape": [0, 0, 0]}


class TakesFloats(Planted):
    """Whole numbers in a float array are taken for ids."""

    caught_by = "codec/test_dtypes.py::test_what_is_no_array_of_ids[whole floats]"

    def encode(self, ids: Any) -> Any:
        floats = isinstance(ids, np.ndarray) and ids.dtype.kind == "f" and bool((ids == np.floor(ids)).all())
        return super().encode(ids.astype(np.int64) if floats else ids)


# Decoding.


class Uint16Leaves(Planted):
    """What arrives as int16 leaves as uint16, for which torch has next to no operations."""

    caught_by = "codec/test_dtypes.py::test_no_other_dtype[uint16]"

    def decode(self, payload: Any) -> Array:
        found = super().decode(payload)
        return found.view(np.uint16) if found.dtype == np.int16 else found


class ReadOnly(Planted):
    """The array is a view of bytes that nobody may write."""

    caught_by = "codec/test_round_trip.py::test_layouts[255-c]"

    def decode(self, payload: Any) -> Array:
        found = super().decode(payload)
        return np.frombuffer(found.tobytes(), found.dtype).reshape(found.shape)


class Scratch(Planted):
    """Every array is a view of the same buffer, in which the next one is decoded."""

    caught_by = "codec/test_round_trip.py::test_decoded_arrays_are_independent[256-30000]"

    def __init__(self) -> None:
        super().__init__()
        self._buffer = np.zeros(2**22, np.uint8)

    def decode(self, payload: Any) -> Array:
        found = super().decode(payload)
        if not 2**10 < found.nbytes < 2**22:
            return found
        view = self._buffer[: found.nbytes].view(found.dtype).reshape(found.shape)
        view[...] = found
        return view


class NegativeFarBehind(Planted):
    """Only the first ids are looked at, for there are many."""

    caught_by = "codec/test_envelopes.py::test_negative_ids_far_behind[int16-4999]"

    def decode(self, payload: Any) -> Array:
        try:
            return super().decode(payload)
        except self.refusals:
            if oracle.violations(payload) != {"negative id"}:
                raise
            found = oracle.decoded(payload)
            if found.reshape(-1)[:36].min() < 0:
                raise
            return found.astype(payload["dtype"])


class NoValidation(Planted):
    """Whatever base64 decodes to is reshaped, if it can be."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[negative id]"

    def decode(self, payload: Any) -> Array:
        try:
            raw = bytearray(base64.b64decode(payload["data"]))
            return np.frombuffer(raw, payload["dtype"]).reshape(payload["shape"])
        except Exception as error:
            raise R3Error("routed_experts", expected="ids", got=type(error).__name__) from error


class LenientBase64(Planted):
    """Characters that are none of base64's are skipped, so that bytes shift."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[newline inside]"

    def decode(self, payload: Any) -> Array:
        if isinstance(payload, dict) and isinstance(payload.get("data"), str) and payload["data"].isascii():
            payload = payload | {"data": "".join(payload["data"].split())}
        return super().decode(payload)


class PadBits(Planted):
    """Base64 that is valid is decoded, canonical or not."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[pad bits set]"

    def decode(self, payload: Any) -> Array:
        with suppress(Exception):
            raw = pybase64.b64decode(payload["data"], validate=True)
            payload = {**payload, "data": base64.b64encode(raw).decode()}
        return super().decode(payload)


class DefaultDtype(Planted):
    """An envelope that names no dtype is one of uint8."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[no dtype]"

    def decode(self, payload: Any) -> Array:
        if isinstance(payload, dict) and set(payload) == {"data", "shape"}:
            wide = isinstance(payload["data"], str) and isinstance(payload["shape"], list)
            payload = {**payload, "dtype": "uint8"}
            if wide and payload["shape"]:
                payload["shape"] = [payload["shape"][0] * 2, *payload["shape"][1:]]
        return super().decode(payload)


class WrongException(Planted):
    """A key that is missing is a KeyError of the reader's."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[no shape]"

    def decode(self, payload: Any) -> Array:
        if isinstance(payload, dict):
            payload["shape"]
        return super().decode(payload)


class DropsKeys(Planted):
    """Keys that it does not know are ignored."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[extra key]"

    def decode(self, payload: Any) -> Array:
        known = ("data", "shape", "dtype")
        return super().decode(
            {key: value for key, value in payload.items() if key in known} if isinstance(payload, dict) else payload
        )


class BoolIsNumber(Planted):
    """True is a dimension of 1."""

    caught_by = "codec/test_envelopes.py::test_wrong_shapes[[2, True, 6]]"

    def decode(self, payload: Any) -> Array:
        if isinstance(payload, dict) and isinstance(payload.get("shape"), list):
            shape = [int(dim) if isinstance(dim, bool) else dim for dim in payload["shape"]]
            payload = payload | {"shape": shape}
        return super().decode(payload)


class AnyDtype(Planted):
    """Ids that a smaller dtype holds are taken in a larger one."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[wider than needed]"

    def decode(self, payload: Any) -> Array:
        if oracle.violations(payload) == {"wider than needed"}:
            return oracle.canonical(oracle.decoded(payload))
        return super().decode(payload)


class AllocatesClaims(Planted):
    """The array is made in the size that the envelope claims, before anybody looks at the data."""

    caught_by = "codec/test_memory.py::test_claims_cost_nothing[2 GiB in the cap, and no data]"

    def decode(self, payload: Any) -> Array:
        with suppress(TypeError, ValueError, KeyError, IndexError, OverflowError):
            np.ones(payload["shape"], payload["dtype"])
        return super().decode(payload)


class CopiesThreeTimes(Planted):
    """Decoding goes through int64."""

    caught_by = "codec/test_memory.py::test_ids_are_held_once"

    def decode(self, payload: Any) -> Array:
        found = super().decode(payload)
        return found.astype(np.int64).astype(found.dtype)


class QuotesEverything(Planted):
    """The error holds the payload."""

    caught_by = "codec/test_envelopes.py::test_wrong_envelopes[a foreign character after a megabyte]"

    def decode(self, payload: Any) -> Array:
        try:
            return super().decode(payload)
        except self.refusals as error:
            error.args = (f"{error}: {payload}",)
            raise


# Whole bodies.


class SuffixScan(Planted):
    """The routes are where the bytes first look like their key."""

    caught_by = "codec/test_bodies.py::test_lookalikes[another key that ends like it]"

    def load(self, body: bytes) -> Reply:
        found = super().load(body)
        at = body.find(b'routed_experts":{')
        if at < 0 or found.routes is None:
            return found
        text = body[at + len(b'routed_experts":') : body.index(b"}", at) + 1]
        return Reply(found.token_ids, found.finish_reason, found.logprobs, self.decode(orjson.loads(text)))


class NotSpliced(Planted):
    """A body is written by a JSON library that puts blanks in it."""

    caught_by = "codec/test_golden.py::test_golden_bodies_are_written[packed-v1-uint8]"

    def dump(self, reply: Reply, encoding: str) -> bytes:
        body = super().dump(reply, encoding)
        return body if encoding == FRAME else json.dumps(json.loads(body), ensure_ascii=False).encode()


class HalfLogprobs(Planted):
    """A frame's logprobs went through half precision."""

    caught_by = "codec/test_bodies.py::test_whole_replies_to_the_byte[frame/1]"

    def dump(self, reply: Reply, encoding: str) -> bytes:
        if reply.logprobs is not None and encoding == FRAME:
            rounded = np.array(reply.logprobs, np.float16).astype(float).tolist()
            reply = Reply(reply.token_ids, reply.finish_reason, rounded, reply.routes, reply.metadata)
        return super().dump(reply, encoding)


class GapsInFrames(Planted):
    """Where the tensors of a frame lie is believed."""

    caught_by = "codec/test_bodies.py::test_wrong_frames[bytes that belong to no tensor]"

    def load(self, body: bytes) -> Reply:
        try:
            return super().load(body)
        except self.refusals:
            if len(body) < 9 or body[7]:
                raise
            size = int.from_bytes(body[:8], "little")
            try:
                header = json.loads(body[8 : 8 + size])
                end = max(info["data_offsets"][1] for name, info in header.items() if name != "__metadata__")
            except Exception:
                end = None
            if end is None:
                raise
            return super().load(body[: 8 + size + end])


class LastNameWins(Planted):
    """Of two tensors with the same name, the second is taken."""

    caught_by = "codec/test_bodies.py::test_wrong_frames[a tensor twice]"

    def load(self, body: bytes) -> Reply:
        size = int.from_bytes(body[:8], "little")
        if len(body) > 8 and not body[7] and size < len(body):
            try:
                text = orjson.dumps(orjson.loads(body[8 : 8 + size]))
            except orjson.JSONDecodeError:
                return super().load(body)
            body = oracle.frame(text, body[8 + size :])
        return super().load(body)


class Recursion(Planted):
    """A reader that walks the JSON by recursion."""

    caught_by = "codec/test_bodies.py::test_deep_and_long[packed-1,000 lists in the choices]"

    def load(self, body: bytes) -> Reply:
        if body[:1] == b"{":
            with suppress(orjson.JSONDecodeError):
                _walk(orjson.loads(body))
        return super().load(body)


def _walk(node: Any) -> None:
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _walk(value)


class TrustsTheTail(Planted):
    """A body that ends early is repaired."""

    caught_by = "codec/test_bodies.py::test_every_cut[packed]"

    def load(self, body: bytes) -> Reply:
        try:
            return super().load(body)
        except self.refusals:
            if not body.endswith(b'"}}]'):
                raise
            return super().load(body + b"}")


class OnlyItsOwn(Planted):
    """A frame is read if it is what this writer would have written."""

    caught_by = "codec/test_bodies.py::test_other_writers_of_frames[blanks]"

    def load(self, body: bytes) -> Reply:
        found = super().load(body)
        if body[7:8] == b"\0" and self.dump(found, FRAME) != body:
            raise R3Error("frame", expected="a frame of this writer", got="another")
        return found


class SortsTokens(Planted):
    """Tokens behind the first thousand change places."""

    caught_by = "codec/test_bodies.py::test_long_replies_are_read[packed-5000]"

    def load(self, body: bytes) -> Reply:
        found = super().load(body)
        return replace(found, token_ids=[*found.token_ids[:1_000], *sorted(found.token_ids[1_000:])])


class RepairsReplies(Planted):
    """Ids that are negative are written as 0."""

    caught_by = "codec/test_bodies.py::test_wrong_replies_are_not_written[packed-a negative id]"

    def dump(self, reply: Reply, encoding: str) -> bytes:
        clipped = reply.routes.clip(0) if reply.routes is not None and reply.routes.dtype.kind in "iu" else reply.routes
        return super().dump(replace(reply, routes=clipped), encoding)


# Trajectories.


class OneRowMore(Planted):
    """The last row is there twice, for the token that was never fed."""

    caught_by = "codec/test_rows.py::test_turns_become_a_trajectory"

    def trace(self, turns: Sequence[Turn]) -> Array:
        found = super().trace(turns)
        return np.concatenate([found, found[-1:]])


class FirstTurnOnly(Planted):
    """What a later turn says of its prompt is put in front of the rows that are there."""

    caught_by = "codec/test_rows.py::test_turns_become_a_trajectory"

    def trace(self, turns: Sequence[Turn]) -> Array:
        first, last = turns[0].rows, super().trace(turns)
        return np.concatenate([last[len(first) :], first.astype(last.dtype)]) if len(turns) > 1 else last


class CutsTheFront(Planted):
    """A cut keeps the last rows."""

    caught_by = "codec/test_rows.py::test_a_cut_keeps_the_first_rows"

    def cut(self, ids: Array, rows: int) -> Array:
        return super().cut(ids, len(ids))[len(ids) - rows :]


def bugs(base: type[Planted] = Planted) -> list[type[Planted]]:
    """Those that derive from ``base``, which are in its module."""
    found = [bug for bug in base.__subclasses__() if bug.__module__ == base.__module__]
    return sorted(found, key=lambda bug: bug.caught_by)


def run(impl: str, *tests: str, report: Path) -> dict[str, Any]:
    """Run ``tests`` against ``impl`` in the ci profile, and give the report."""
    command = [sys.executable, "-m", "pytest", *(str(HERE / test) for test in tests), "--impl", impl, "-q"]
    command += ["--report", str(report), "-p", "no:cacheprovider", "--disable-warnings"]
    ran = finish(command, cwd=HERE.parent)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"status {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return json.loads(report.read_text("utf-8"))


def failed(report: dict[str, Any]) -> list[str]:
    """The tests of a report that failed."""
    return [name for row in report["properties"] for name in row["failed"]]


def table(found: Sequence[type[Planted]]) -> str:
    """Which test caught each bug, as Markdown.

    Raises:
        RuntimeError: One was not caught by its test.
    """
    lines = ["| bug | caught by |", "|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for bug in found:
            report = run(f"{bug.__module__}:{bug.__name__}", bug.caught_by, report=Path(folder) / "report.json")
            if not failed(report):
                raise RuntimeError(f"{bug.__name__} was not caught by {bug.caught_by}")
            lines.append(f"| {bug.__doc__} | `{bug.caught_by}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # As a module of its own name, not as __main__, of which --impl knows nothing.
    from contract_tests import planted
    from contract_tests.http.planted import PlantedHttp

    print(planted.table([*planted.bugs(), *planted.bugs(PlantedHttp)]), end="")
