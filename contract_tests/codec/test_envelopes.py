"""Envelopes that are wrong. The oracle says what is, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import corruption, oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import Adapter
from contract_tests.codec.attempts import attempt, refused
from contract_tests.corruption import fed

pytestmark = pytest.mark.capability("packed")

RIGHT = {
    name: oracle.envelope(array)
    for name, array in {
        "uint8": np.arange(12, dtype=np.uint8).reshape(2, 3, 2),
        "int16": np.arange(256, 268, dtype=np.int16).reshape(2, 3, 2),
        "int32": np.arange(70_000, 70_005, dtype=np.int32).reshape(5, 1, 1),
        "no rows": np.zeros((0, 4, 2), np.uint8),
    }.items()
}


def judge(impl: Adapter, envelope: Any) -> None:
    """Check that ``impl`` decodes what the oracle does, and refuses what it refuses.

    What is wrong only in ways that the implementation is known to let pass may be decoded or refused.
    """
    wrong = oracle.violations(envelope, impl.quirks.max_bytes)
    found = attempt(impl, impl.decode, envelope)
    if isinstance(found, Exception):
        assert wrong, f"refused, although nothing is wrong: {found}"
        return
    assert wrong <= impl.quirks.lenient, f"decoded, although wrong: {', '.join(sorted(wrong))}"
    oracle.assert_canonical(found, oracle.decoded(envelope))


KINDS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "bytes": str.encode,
    "bytearray": lambda text: bytearray(text.encode()),
    "memoryview": lambda text: memoryview(text.encode()),
}
"""What data may be: a reader that takes it out of the body need not make a text of it."""


def test_right_envelopes(impl: Adapter) -> None:
    """Right envelopes are decoded: data as text or as a buffer of bytes."""
    for envelope in RIGHT.values():
        assert oracle.violations(envelope) == set()
        for kind in KINDS.values():
            found = impl.decode({**envelope, "data": kind(envelope["data"])})
            oracle.assert_canonical(found, oracle.decoded(envelope))


def _with(name: str, **changes: Any) -> dict[str, Any]:
    return {**RIGHT[name], **changes}


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in RIGHT["int16"].items() if key not in keys}


def _counting(count: int) -> str:
    """The data of ids from 256 on."""
    return oracle.envelope(np.arange(256, 256 + count, dtype=np.int16).reshape(count, 1, 1))["data"]


_DATA = RIGHT["int16"]["data"]
WRONG: dict[str, Any] = {
    "no dtype": _without("dtype"),
    "no shape": _without("shape"),
    "no data": _without("data"),
    "nothing": {},
    "extra key": _with("int16", start=0),
    "one item short": _with("int16", data=_counting(11)),
    "one item long": _with("int16", data=_counting(13)),
    "odd bytes for int16": {"data": "AAEC", "shape": [1, 1, 1], "dtype": "int16"},
    "int16 bytes as uint8": _with("int16", dtype="uint8"),
    "a row more claimed": _with("int16", shape=[3, 3, 2]),
    "axes swapped into another size": _with("int16", shape=[2, 2, 2]),
    "negative id": oracle.envelope(np.array([[[300, -1]]], np.int16)),
    "all negative": oracle.envelope(np.full((2, 1, 1), -32768, np.int16)),
    "negative id, int32": oracle.envelope(np.array([[[-1, 70_000]]], np.int32)),
    "wider than needed": oracle.envelope(np.array([[[255, 7]]], np.int16)),
    "int32 for int16": oracle.envelope(np.array([[[32767]]], np.int32)),
    "no rows as int16": {"data": "", "shape": [0, 4, 2], "dtype": "int16"},
    "newline inside": _with("int16", data=_DATA[:4] + "\n" + _DATA[4:]),
    "newline in place": _with("int16", data=_DATA[:4] + "\n" + _DATA[5:]),
    "newline behind": _with("int16", data=_DATA + "\n"),
    "foreign character": _with("int16", data="!" + _DATA[1:]),
    "url-safe alphabet": {"data": "-_-_", "shape": [1, 1, 3], "dtype": "uint8"},
    "not ascii": _with("int16", data="é" + _DATA[1:]),
    "no padding": {"data": "AA", "shape": [1, 1, 1], "dtype": "uint8"},
    "more padding": {"data": "AAA==", "shape": [1, 1, 2], "dtype": "uint8"},
    "pad bits set": {"data": "AB==", "shape": [1, 1, 1], "dtype": "uint8"},
    "pad bit set, two bytes": {"data": "AAB=", "shape": [1, 1, 2], "dtype": "uint8"},
    "data after padding": {"data": "AA==AAAA", "shape": [1, 1, 4], "dtype": "uint8"},
    "empty": _with("int16", data=""),
    "base64 of .npy": _with("int16", data="k05VTVBZAQB2AHsn"),
    "base85": _with("int16", data="009C61O)~M2nh-c3"),
    "hex": _with("int16", data="00010101020103010401050106010701"),
    "twice": _with("int16", data=_DATA + _DATA),
    "a dtype too long": _with("int16", dtype="int16 "),
    "a shape of 10,000 axes": _with("int16", shape=[1] * 10_000),
    "dtype in another case": _with("int16", dtype="Int16"),
    "dtype with a NUL": _with("uint8", dtype="uint8\0"),
    "dtype in wide letters": _with("uint8", dtype="\N{FULLWIDTH LATIN SMALL LETTER U}int8"),
    "an extra key of null": _with("int16", start=None),
    "an extra key of text": _with("int16", version="1"),
    "an extra key with an underscore": _with("int16", _note=0),
    "an extra key without a name": {**RIGHT["int16"], "": 0},
    "a dimension of 65 bits": _with("int16", shape=[2**64, 1, 1]),
    "a dimension of 4,000 bits": _with("int16", shape=[2**4000, 1, 1]),
    "half of a surrogate pair": _with("int16", data="\ud800" + _DATA[1:]),
    "a foreign character after a megabyte": {"data": "A" * 2**20 + "!AAA", "shape": [786_435, 1, 1], "dtype": "uint8"},
}  # fmt: skip


@pytest.mark.case("R35", "R46", "R47", "R48")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_envelopes(impl: Adapter, case: str) -> None:
    """Each of a list of wrong envelopes is refused with an exception of the documented kind, in few words."""
    given = WRONG[case]
    text = given.get("data")
    # Text that is no ASCII has no bytes that could mean it.
    kinds = KINDS.values() if isinstance(text, str) and text.isascii() else [lambda data: data]
    for kind in kinds:
        payload = {**given, "data": kind(text)} if "data" in given else given
        refused(impl, impl.decode, fed("list", payload))


FAR = {
    "newline": lambda text, at: text[:at] + "\n" + text[at + 1 :],
    "MIME lines": lambda text, at: "\n".join(text[start : start + 76] for start in range(0, len(text), 76)),
    "url-safe": lambda text, at: text[:at] + "_" + text[at + 1 :],
    "foreign": lambda text, at: text[:at] + "!" + text[at + 1 :],
    "padding inside": lambda text, at: text[: at - at % 4] + "AA==" + text[at - at % 4 + 4 :],
    "pad bits": lambda text, at: text[:-4] + "AB==",
    "no padding": lambda text, at: text.rstrip("="),
}


@pytest.mark.case("R47")
@pytest.mark.parametrize("size", [100, 1_000, 70_000, 200_002])
@pytest.mark.parametrize("fault", FAR)
def test_faults_far_behind(impl: Adapter, fault: str, size: int) -> None:
    """Base64 is checked to its end, however long it is, and whether it is text or a buffer."""
    size = size - size % 3 + 1
    right = oracle.envelope(np.zeros((size, 1, 1), np.uint8))
    text = FAR[fault](right["data"], len(right["data"]) - 40)
    for kind in KINDS.values():
        judge(impl, fed("far", {**right, "data": kind(text)}))


@pytest.mark.case("R10", "R46")
@pytest.mark.parametrize("at", [0, 35, 36, 4_999])
@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_negative_ids_far_behind(impl: Adapter, dtype: str, at: int) -> None:
    """A single negative id is found, wherever it is."""
    ids = np.full(5_000, 300 if dtype == "int16" else 70_000, dtype)
    ids[at] = -1
    refused(impl, impl.decode, fed("far", oracle.envelope(ids.reshape(-1, 5, 2))))


STRANGERS = {
    "JSON text": lambda right: orjson.dumps(right).decode(),
    "JSON bytes": orjson.dumps,
    "pairs": lambda right: [list(pair) for pair in right.items()],
    "a tuple": lambda right: tuple(right.values()),
    "an array": oracle.decoded,
    "nested lists": lambda right: oracle.decoded(right).tolist(),
    "the envelope in a list": lambda right: [right],
    "the envelope in itself": lambda right: {**right, "data": right},
}


@pytest.mark.case("R48")
@pytest.mark.parametrize("kind", STRANGERS)
def test_other_forms(impl: Adapter, kind: str) -> None:
    """The same routes in another form are refused: who sends them has another contract."""
    refused(impl, impl.decode, fed("list", STRANGERS[kind](RIGHT["int16"])))


@pytest.mark.case("R46", "R48")
@pytest.mark.parametrize("value", r3st.NOT_OBJECTS, ids=repr)
def test_what_is_no_object(impl: Adapter, value: Any) -> None:
    """Text, numbers and lists in the place of an envelope are refused."""
    refused(impl, impl.decode, fed("list", value))


@pytest.mark.case("R27", "R46")
@pytest.mark.parametrize("dtype", r3st.WRONG_DTYPES, ids=repr)
def test_wrong_dtypes(impl: Adapter, dtype: Any) -> None:
    """No other dtype than the three, and no other name of theirs, is taken."""
    # With as many bytes as it could mean, so that their number does not give it away.
    for item_bytes in (1, 2, 4, 8):
        data = KINDS["text"](oracle.envelope(np.ones((3 * item_bytes, 1, 1), np.uint8))["data"])
        refused(impl, impl.decode, fed("list", {"data": data, "shape": [1, 1, 3], "dtype": dtype}))


@pytest.mark.case("R46")
@pytest.mark.parametrize("shape", r3st.WRONG_SHAPES, ids=repr)
def test_wrong_shapes(impl: Adapter, shape: Any) -> None:
    """A shape is a list of three integers of 0 or more that the bytes fill: no bools, floats, texts or other axes."""
    for name in ("uint8", "int16"):
        refused(impl, impl.decode, fed("list", {**RIGHT[name], "shape": shape}))


@pytest.mark.case("R46")
@pytest.mark.parametrize("data", r3st.WRONG_DATA, ids=repr)
def test_wrong_data(impl: Adapter, data: Any) -> None:
    """Data is text or a buffer."""
    refused(impl, impl.decode, fed("list", _with("int16", data=data)))


@pytest.mark.parametrize("kind", ["backwards", "every second byte", "two bytes an item"])
def test_buffers_with_gaps(impl: Adapter, kind: str) -> None:
    """A buffer that is not one run of bytes is refused: what its bytes are is not clear."""
    text = RIGHT["int16"]["data"].encode()
    data = {
        "backwards": memoryview(text)[::-1],
        "every second byte": memoryview(text + text)[::2],
        "two bytes an item": memoryview(text).cast("H"),
    }[kind]
    refused(impl, impl.decode, fed("list", _with("int16", data=data)))


@r3st.more(5)
@given(envelope=st.sampled_from(list(RIGHT.values())).flatmap(corruption.structure_of).map(corruption.without_twice))
def test_accidents_of_structure(impl: Adapter, envelope: Any) -> None:
    """After accidents to its structure, an envelope is decoded if the oracle decodes it, and else refused."""
    judge(impl, fed("envelope structure", envelope))


@r3st.more(5)
@given(text=st.sampled_from([orjson.dumps(envelope) for envelope in RIGHT.values()]).flatmap(corruption.bytes_of))
def test_accidents_of_bytes(impl: Adapter, text: bytes) -> None:
    """After accidents to its bytes, an envelope that is still JSON is decoded if the oracle decodes it, and else
    refused.
    """
    try:
        envelope = orjson.loads(text)
    except orjson.JSONDecodeError:
        return
    judge(impl, fed("envelope bytes", envelope))


@r3st.more(2)
@given(data=st.sampled_from(list(RIGHT.values())).flatmap(lambda right: st.tuples(
    st.just(right), corruption.bytes_of(right["data"].encode()))))  # fmt: skip
def test_accidents_of_base64(impl: Adapter, data: tuple[dict[str, Any], bytes]) -> None:
    """After accidents to its base64, an envelope is decoded if the oracle decodes it, and else refused."""
    right, changed = data
    judge(impl, fed("envelope base64", {**right, "data": changed}))


@given(malformed=r3st.malformed_envelopes())
def test_one_fault_each(impl: Adapter, malformed: r3st.Malformed) -> None:
    """Envelopes that are wrong in one way, at any size, are refused."""
    judge(impl, fed("envelope fault", malformed.envelope))


@given(value=r3st.json_values())
def test_anything(impl: Adapter, value: Any) -> None:
    """Whatever JSON can say is decoded as the oracle decodes it or refused; nothing else escapes."""
    judge(impl, fed("any JSON", value))
