"""``skyrl_r3.frame``: the reply as one safetensors document."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import corruption, oracle
from contract_tests import strategies as r3st
from skyrl_r3 import frame
from skyrl_r3.errors import CodecError, R3Error, ReplyError
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec, layers_text

TOKENS = np.array([21, 22], np.int32)
LOGPROBS = np.array([-0.5, -9999.0], np.float32)
IDS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
NAMES = {"uint8": "U8", "int16": "I16", "int32": "I32", "float32": "F32"}


def _reply(**changes: Any) -> Reply:
    fields = {"token_ids": TOKENS, "finish_reason": "stop", "logprobs": LOGPROBS, "routed_experts": IDS}
    return Reply(**(fields | changes))


def _document(header: Any, data: bytes = b"") -> bytes:
    """A frame with this header, an object or its text, written without the code under test."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _header(**arrays: Any) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of a right frame of ``arrays``, the usual ones where none are given."""
    arrays = arrays or {"token_ids": TOKENS, "logprobs": LOGPROBS, "routed_experts": IDS}
    header: dict[str, Any] = {"__metadata__": {"format": "skyrl-r3/1", "finish_reason": "stop"}}
    data = b""
    for name, array in arrays.items():
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        data += raw
    return header, data


def _with(name: str, **changes: Any) -> bytes:
    """A frame in which one tensor's description is wrong. ``...`` leaves a key out."""
    header, data = _header()
    header[name] = {key: value for key, value in (header[name] | changes).items() if value is not ...}
    return _document(header, data)


def _with_metadata(**changes: Any) -> bytes:
    header, data = _header()
    header["__metadata__"] = {k: v for k, v in (header["__metadata__"] | changes).items() if v is not ...}
    return _document(header, data)


def _refused(body: Any) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        frame.load(body)
    assert isinstance(caught.value, ReplyError)
    assert len(str(caught.value)) < 1_000
    return caught.value


def _assert_vector(array: Any, want: r3st.Array, dtype: str) -> None:
    assert type(array) is np.ndarray
    assert array.dtype.str == np.dtype(dtype).str
    assert array.shape == want.shape
    # As bytes: -0.0 equals 0.0.
    assert array.tobytes() == want.astype(dtype).tobytes()


def _assert_routes(array: Any, values: r3st.Array) -> None:
    assert type(array) is np.ndarray
    assert array.dtype.str == np.dtype(oracle.smallest(int(values.max(initial=0)))).str
    assert array.shape == values.shape
    assert array.tolist() == values.tolist()
    assert array.flags.c_contiguous


# Golden bytes. A change of any of them breaks every server and client that is not upgraded at the same moment.


def test_exact_bytes_of_small_ids() -> None:
    body = frame.dump(_reply(routed_experts=np.array([[[1, 2], [3, 255]]], np.uint16), prompt_tokens=0, start=0))
    assert body == (
        b"\x20\x01\0\0\0\0\0\0"
        b'{"__metadata__":{"format":"skyrl-r3/1","finish_reason":"stop","prompt_tokens":"0","start":"0"},'
        b'"token_ids":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},'
        b'"logprobs":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},'
        b'"routed_experts":{"dtype":"U8","shape":[1,2,2],"data_offsets":[16,20]}}'
        b"\x15\0\0\0\x16\0\0\0\0\0\0\xbf\0\x3c\x1c\xc6\x01\x02\x03\xff"
    )


def test_exact_bytes_of_wide_ids_and_everything_known() -> None:
    ids = np.array([[[256, 32767]]], np.uint16)
    spec = RouteSpec(num_experts=40000, topk=2, layers=61, moe_layers=(*range(3, 60), 60))
    known: dict[str, Any] = {"prompt_tokens": 3, "start": 1, "spec": spec, "model": "é"}
    assert frame.dump(_reply(routed_experts=ids, **known)) == (
        b"\x78\x01\0\0\0\0\0\0"
        b'{"__metadata__":{"format":"skyrl-r3/1","finish_reason":"stop","model":"\xc3\xa9","prompt_tokens":"3",'
        b'"start":"1","num_experts":"40000","topk":"2","layers":"61","moe_layers":"3-60"},'
        b'"token_ids":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},'
        b'"logprobs":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},'
        b'"routed_experts":{"dtype":"I16","shape":[1,1,2],"data_offsets":[16,20]}}       '
        b"\x15\0\0\0\x16\0\0\0\0\0\0\xbf\0\x3c\x1c\xc6\0\x01\xff\x7f"
    )


def test_exact_bytes_of_the_widest_ids_without_logprobs() -> None:
    ids = np.array([[[32768], [2**31 - 1]]], np.int64)
    assert frame.dump(_reply(routed_experts=ids, logprobs=None, finish_reason=None)) == (
        b"\xb0\0\0\0\0\0\0\0"
        b'{"__metadata__":{"format":"skyrl-r3/1"},'
        b'"token_ids":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},'
        b'"routed_experts":{"dtype":"I32","shape":[1,2,1],"data_offsets":[8,16]}}    '
        b"\x15\0\0\0\x16\0\0\0\0\x80\0\0\xff\xff\xff\x7f"
    )


def test_exact_bytes_without_routes_and_tokens() -> None:
    reply = Reply(token_ids=np.empty(0, np.int32), finish_reason="abort", logprobs=None, routed_experts=None)
    assert frame.dump(reply) == (
        b"\x80\0\0\0\0\0\0\0"
        b'{"__metadata__":{"format":"skyrl-r3/1","finish_reason":"abort"},'
        b'"token_ids":{"dtype":"I32","shape":[0],"data_offsets":[0,0]}}   '
    )


@given(r3st.reply_fields())
def test_buffers_are_aligned(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    """A reader that maps the file gets arrays at addresses that the widest dtype wants."""
    body = frame.dump(Reply(**made[0]))
    (size,) = struct.unpack("<Q", body[:8])
    assert size % 8 == 0
    for name, info in orjson.loads(body[8 : 8 + size]).items():
        assert name == "__metadata__" or info["data_offsets"][0] % 4 == 0


# Round trips of every layout and dtype, and no rows.


@pytest.mark.case("R26", "R27", "R34", "R50")
@given(r3st.reply_fields())
def test_what_is_written_is_read(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    fields, routes = made
    got = frame.load(frame.dump(Reply(**fields)))
    _assert_vector(got.token_ids, fields["token_ids"], "int32")
    if fields["logprobs"] is None:
        assert got.logprobs is None
    else:
        _assert_vector(got.logprobs, fields["logprobs"], "float32")
    if routes is None:
        assert got.routed_experts is None
    else:
        _assert_routes(got.routed_experts, routes.values)
    for name in ("finish_reason", "prompt_tokens", "start", "spec", "model"):
        assert getattr(got, name) == fields[name]


@pytest.mark.case("R26", "R27", "R34", "R50")
@pytest.mark.parametrize("layout", list(r3st.ALL_LAYOUTS))
@pytest.mark.parametrize("max_id", [255, 256, 383, 32767, 32768, 2**31 - 1])
def test_every_layout_at_every_dtype_edge(layout: str, max_id: int) -> None:
    """Without chance, and against the bytes: safetensors' own writer takes another order for C order without a word."""
    dtype = "int64" if max_id > 2**15 else "uint16" if max_id > 255 else "uint8"
    ids = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    ids[0, 1, 2] = max_id  # in the first row, which is all that the broadcast layouts keep
    routes = r3st.lay_out(ids, layout)
    body = frame.dump(_reply(routed_experts=routes.given))
    _assert_routes(frame.load(body).routed_experts, routes.values)
    assert body.endswith(routes.values.astype("<" + np.dtype(oracle.smallest(max_id)).str[1:]).tobytes())


@pytest.mark.case("R14")
@given(r3st.reply_fields())
def test_a_frame_does_not_alias(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    """The engine may write its buffer again."""
    fields, routes = made
    body = frame.dump(Reply(**fields))
    again = bytes(body)
    if routes is not None:
        routes.overwrite()
    assert body == again


@pytest.mark.case("R10", "R25")
@pytest.mark.parametrize(
    "wrong", ["AAEC", [[[1]]], np.zeros((2, 2)), np.full((1, 1, 1), -1)], ids=["str", "list", "2d", "-1"]
)
def test_routes_that_are_none_are_not_written(wrong: Any) -> None:
    with pytest.raises(CodecError) as caught:
        frame.dump(_reply(routed_experts=wrong))
    assert caught.value.field == "routed_experts"


def test_a_name_that_is_too_long_for_a_header_is_refused_when_it_is_written() -> None:
    with pytest.raises(ReplyError) as caught:
        frame.dump(_reply(model="m" * 2**16))
    assert caught.value.field == "frame"


@pytest.mark.case("R23")
def test_writing_needs_no_copy_of_the_routes_but_the_frame() -> None:
    """Also not for vLLM's uint16."""
    ids = np.full((4000, 48, 8), 300, np.uint16)
    frame.dump(_reply(routed_experts=ids))
    tracemalloc.start()
    try:
        body = frame.dump(_reply(routed_experts=ids))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= len(body) + 100_000


# Any safetensors reader.


@given(r3st.reply_fields())
def test_safetensors_reads_what_is_written(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    fields, routes = made
    tensors = safetensors.numpy.load(frame.dump(Reply(**fields)))
    _assert_vector(tensors.pop("token_ids"), fields["token_ids"], "int32")
    if fields["logprobs"] is not None:
        _assert_vector(tensors.pop("logprobs"), fields["logprobs"], "float32")
    if routes is not None:
        _assert_routes(tensors.pop("routed_experts"), routes.values)
    assert tensors == {}


def test_a_saved_reply_opens_with_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "reply.safetensors"
    spec = RouteSpec(num_experts=128, topk=3, layers=8, moe_layers=(1, 3, 5, 6, 7))
    known: dict[str, Any] = {"prompt_tokens": 3, "start": 1, "spec": spec, "model": "é"}
    path.write_bytes(frame.dump(_reply(**known)))
    with safetensors.safe_open(path, framework="numpy") as document:
        assert document.metadata() == {
            "format": "skyrl-r3/1",
            "finish_reason": "stop",
            "prompt_tokens": "3",
            "start": "1",
            "num_experts": "128",
            "topk": "3",
            "layers": "8",
            "moe_layers": "1,3,5-7",
            "model": "é",
        }
        assert set(document.keys()) == {"token_ids", "logprobs", "routed_experts"}
        assert document.get_tensor("routed_experts").tolist() == IDS.tolist()


@given(ids=r3st.ids(), tokens=st.lists(st.integers(0, 9), max_size=4), scored=st.booleans(), note=st.text(max_size=12))
def test_what_safetensors_writes_is_read(ids: r3st.Array, tokens: list[int], scored: bool, note: str) -> None:
    """It sorts the tensors, and a header of its own has another length."""
    ids = ids.astype(oracle.smallest(int(ids.max(initial=0))))
    tensors = {"token_ids": np.array(tokens, np.int32), "routed_experts": ids}
    if scored:
        tensors["logprobs"] = np.full(len(tokens), -0.5, np.float32)
    metadata = {"format": "skyrl-r3/1", "finish_reason": note, "start": "2", "note": note}
    got = frame.load(safetensors.numpy.save(tensors, metadata))
    assert (got.finish_reason, got.start, got.prompt_tokens, got.model) == (note, 2, None, "")
    _assert_vector(got.token_ids, tensors["token_ids"], "int32")
    _assert_routes(got.routed_experts, ids.astype(np.int64))
    assert got.logprobs is None if not scored else got.logprobs is not None and set(got.logprobs.tolist()) <= {-0.5}


@pytest.mark.parametrize("pad", range(8))
def test_a_header_of_any_length_is_read(pad: int) -> None:
    """Its buffers then begin at odd addresses."""
    header, data = _header(token_ids=TOKENS, logprobs=LOGPROBS, routed_experts=IDS.astype(np.int16) + 300)
    got = frame.load(_document(json.dumps(header).encode() + b" " * pad, data))
    assert got.token_ids.tolist() == TOKENS.tolist()
    assert got.logprobs is not None
    assert got.logprobs.tolist() == LOGPROBS.tolist()
    _assert_routes(got.routed_experts, IDS.astype(np.int64) + 300)


# Views of the body.


def _root(array: Any) -> Any:
    """What keeps the memory of ``array``."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.obj if isinstance(array, memoryview) else array.base
    return array


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_arrays_are_views_of_the_body(kind: type, dtype: str) -> None:
    """A reply of 12 MB is not copied, and nothing but the body is kept alive."""
    top = {"uint8": 0, "int16": 300, "int32": 40_000}[dtype]
    body = kind(frame.dump(_reply(routed_experts=IDS.astype(np.int32) + top)))
    reply = frame.load(body)
    owner = body.obj if isinstance(body, memoryview) else body
    for array in (reply.token_ids, reply.logprobs, reply.routed_experts):
        assert array is not None
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))
        assert _root(array) is owner
        assert array.flags.writeable is (kind is bytearray)
    assert reply.routed_experts is not None
    assert reply.routed_experts.dtype.name == dtype
    if kind is not bytearray:
        with pytest.raises(ValueError, match="read-only"):
            reply.routed_experts[0] = 1


def test_a_writable_body_is_written_through() -> None:
    body = bytearray(frame.dump(_reply()))
    routes = frame.load(body).routed_experts
    assert routes is not None
    routes[3, 1, 2] = 99
    assert body[-1] == 99


def test_reading_allocates_next_to_nothing() -> None:
    body = frame.dump(_reply(routed_experts=np.full((4000, 48, 8), 300, np.int16)))
    frame.load(body)
    tracemalloc.start()
    try:
        reply = frame.load(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reply.routed_experts is not None
    assert peak < 50_000


# Wrong frames. Each one is refused by the field that is wrong.


def test_the_right_frame_that_the_wrong_ones_are_made_of() -> None:
    reply = frame.load(_document(*_header()))
    assert reply.token_ids.tolist() == TOKENS.tolist()
    assert reply.routed_experts is not None
    assert reply.routed_experts.tolist() == IDS.tolist()


@pytest.mark.parametrize("body", [b"", b"\0", b"\1\0\0\0\0\0\0", bytes(8), bytes(9), bytes(100)], ids=repr)
def test_no_header(body: bytes) -> None:
    assert _refused(body).field == "frame"


@pytest.mark.parametrize("size", [0, 3, 2**16 + 1, 2**24, 2**31, 2**32, 2**56 - 1, 2**63, 2**64 - 1])
def test_another_length_of_the_header(size: int) -> None:
    """Nothing is allocated for it. With 3 it ends in the middle."""
    body = struct.pack("<Q", size) + _document(*_header())[8:]
    assert _refused(body).field == "frame"


def test_a_header_one_byte_longer_than_the_body() -> None:
    text = json.dumps({"__metadata__": {"format": "skyrl-r3/1"}}).encode()
    assert _refused(struct.pack("<Q", len(text)) + text).got == "none of that name"
    assert (
        _refused(struct.pack("<Q", len(text) + 1) + text).got == f"{len(text) + 1} in a body of {len(text) + 8} bytes"
    )


def test_the_longest_header() -> None:
    """A few hundred bytes are enough for any reply. What is longer is not parsed."""
    header, data = _header()
    text = json.dumps(header).encode()
    frame.load(_document(text + b" " * (2**16 - len(text)), data))
    assert _refused(_document(text + b" " * (2**16 - len(text) + 1), data)).field == "frame"


@pytest.mark.parametrize(
    "text",
    [
        b" ",
        b"{",
        b"{}x",
        b"{'token_ids':1}",
        b'{"a":1,}',
        b"\0\0\0",
        b"\xff\xfe{}",
        b"[" * 5_000,
        b"[" * 2**16,
        b'{"a":' * 13_000,
        b'{"a":' + b"1" * 4_000 + b"}",
        b'{"a":' + b"1" * 5_000 + b"}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_a_header_that_is_no_json(text: bytes) -> None:
    assert _refused(_document(text)).field == "frame"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be", "utf-8-sig"])
def test_a_header_in_another_encoding_than_utf_8(encoding: str) -> None:
    """The standard library's parser would guess it, and other safetensors readers would not."""
    header, data = _header()
    assert _refused(_document(json.dumps(header).encode(encoding), data)).field == "frame"


@pytest.mark.parametrize(
    "raw", [b"\xff", b"\xc3", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\n", b"\0", b"\\x", b"\\ud800"]
)
def test_a_string_that_is_no_json_in_utf_8(raw: bytes) -> None:
    """Also half a surrogate pair, as three bytes or escaped, which Python's own parser lets through."""
    text = json.dumps(_header()[0]).encode().replace(b'"stop"', b'"st%sop"')
    assert frame.load(_document(text % "é".encode(), _header()[1])).finish_reason == "stéop"
    assert _refused(_document(text % raw, _header()[1])).field == "frame"


@pytest.mark.parametrize("header", [None, True, 0, 1.5, "x", [], [{}], "token_ids", [["token_ids", {}]]], ids=repr)
def test_a_header_that_is_no_object(header: Any) -> None:
    assert _refused(_document(header)).field == "frame"


@pytest.mark.parametrize("metadata", [None, True, 1, "x", [], ["format"], [["format", "skyrl-r3/1"]]], ids=repr)
def test_metadata_that_is_no_object(metadata: Any) -> None:
    header, data = _header()
    assert _refused(_document(header | {"__metadata__": metadata}, data)).field == "__metadata__"


@pytest.mark.parametrize("value", [None, True, 1, 1.5, [], {}, ["x"], {"a": "b"}, 10**300], ids=lambda v: repr(v)[:9])
@pytest.mark.parametrize("key", ["format", "finish_reason", "start", "model", "note"])
def test_metadata_that_are_no_strings(key: str, value: Any) -> None:
    """Also of keys that we do not know: safetensors has no others."""
    assert _refused(_with_metadata(**{key: value})).field == "__metadata__"


@pytest.mark.parametrize("name", [..., "", "skyrl-r3/2", "skyrl-r3/1 ", "SKYRL-R3/1", "skyrl-r3", "pt"], ids=repr)
def test_another_format(name: Any) -> None:
    """Any other safetensors document, and frames of versions to come."""
    error = _refused(_with_metadata(format=name))
    assert error.field == "__metadata__.format"
    assert error.hint


def test_no_metadata() -> None:
    header, data = _header()
    del header["__metadata__"]
    assert _refused(_document(header, data)).field == "__metadata__.format"


def test_other_metadata_are_ignored() -> None:
    """Servers of later versions may say more."""
    reply = frame.load(_with_metadata(note="x", moe_layer="1,2,3", top_k="not a number", **{"": "", "é": "é"}))
    assert reply.finish_reason == "stop"


@pytest.mark.parametrize("name", ["prompt_tokens", "start", "num_experts", "topk", "layers"])
@pytest.mark.parametrize(
    "text",
    ["", " ", "-1", "+1", " 1", "1 ", "1\n", "\uff11", "\u0663", "\u00b2", "1e3", "1.0", "1_000", "0x1", "None", "null",
     "nan", "12345678901", "9" * 5_000],
    ids=lambda text: ascii(text[:12]),
)  # fmt: skip
def test_numbers_are_decimal_digits(name: str, text: str) -> None:
    """Not whatever ``int`` takes, and none that it refuses to read with an error of its own."""
    assert _refused(_with_metadata(**{name: text})).field == f"__metadata__.{name}"


@pytest.mark.parametrize("name", ["prompt_tokens", "start", "num_experts"])
@pytest.mark.parametrize("number", [0, 1, 9_999_999_999])
def test_numbers_that_are_read(name: str, number: int) -> None:
    def read(**metadata: str) -> Any:
        reply = frame.load(_with_metadata(**metadata))
        return getattr(reply.spec if name in ("num_experts", "layers") else reply, name)

    assert read(**{name: str(number)}) == number
    assert read() is None


@pytest.mark.case("R12")
def test_rows_of_another_width_than_the_model_s() -> None:
    """Columns of shared experts, say. They are not cut off."""
    ids = np.arange(36).reshape(4, 1, 9)
    body = frame.dump(_reply(routed_experts=ids, spec=RouteSpec(topk=8, num_experts=32)))
    error = _refused(body)
    assert (error.field, error.expected, error.got) == ("__metadata__.topk", "9 as in routed_experts", "8")
    assert frame.load(frame.dump(_reply(routed_experts=ids))).spec == RouteSpec()
    assert frame.load(frame.dump(_reply(routed_experts=ids[:0], spec=RouteSpec(topk=8)))).spec.topk == 8
    assert frame.load(frame.dump(_reply(routed_experts=None, spec=RouteSpec(topk=8)))).spec.topk == 8


# Layers, as ranges: one text for each set of them.

LAYERS = {
    "0": (0,),
    "4095": (4095,),
    "0-1": (0, 1),
    "3-60": tuple(range(3, 61)),
    "1,3,5-7": (1, 3, 5, 6, 7),
    "0-4095": tuple(range(4096)),
    "0-98,100-199": (*range(99), *range(100, 200)),
}


@pytest.mark.parametrize("text", LAYERS)
def test_layers_that_are_read(text: str) -> None:
    assert frame.load(_with_metadata(moe_layers=text)).spec.moe_layers == LAYERS[text]
    assert layers_text(LAYERS[text]) == text


@pytest.mark.parametrize("text", corruption.WRONG_LAYERS, ids=lambda text: ascii(text[:12]))
def test_layers_that_are_refused(text: str) -> None:
    error = _refused(_with_metadata(moe_layers=text, layers="8"))
    assert error.field == "__metadata__.moe_layers"
    assert error.expected == "ascending ranges of layers below 8, as 1,3,5-7"


@pytest.mark.parametrize("layers", [None, "4096", "4097", "9999999999"])
def test_layers_are_bounded_whatever_the_frame_says(layers: str | None) -> None:
    told = {} if layers is None else {"layers": layers}
    assert _refused(_with_metadata(moe_layers="0-4096", **told)).field == "__metadata__.moe_layers"
    assert frame.load(_with_metadata(moe_layers="4095", **told)).spec.moe_layers == (4095,)


def test_layers_that_are_spelled_out_over_and_over_take_no_room() -> None:
    body = _with_metadata(moe_layers=",".join(["0-4095"] * 9_000))
    _refused(body)
    tracemalloc.start()
    try:
        _refused(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_a_model_that_does_not_route_says_nothing_of_layers() -> None:
    spec = RouteSpec(layers=2, num_experts=0, moe_layers=())
    assert frame.load(frame.dump(_reply(spec=spec))).spec == RouteSpec(layers=2, num_experts=0)


# Names.


@pytest.mark.parametrize("name", ["routed_expert", "x", "", "TOKEN_IDS", "__metadata", "0"])
def test_an_unknown_tensor(name: str) -> None:
    """One that is ignored could be what somebody meant to send."""
    header, data = _header()
    end = len(data)
    header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}
    assert _refused(_document(header, data + b"\0")).field == "frame"
    header[name] = None
    assert _refused(_document(header, data)).field == "frame"


def test_many_unknown_tensors() -> None:
    header, data = _header()
    header |= {f"{number}": 0 for number in range(6_000)}
    assert _refused(_document(json.dumps(header, separators=(",", ":")).encode(), data)).field == "frame"


@pytest.mark.parametrize("keep", [{"logprobs": LOGPROBS}, {"routed_experts": IDS}], ids=repr)
def test_no_token_ids(keep: dict[str, Any]) -> None:
    assert _refused(_document(*_header(**keep))).got == "none of that name"


def _twice(text: str, pair: str) -> str:
    assert text.count(pair) == 1
    return text.replace(pair, f"{pair}, {pair}")


@pytest.mark.parametrize(
    "pair",
    [
        '"format": "skyrl-r3/1"',
        '"dtype": "F32"',
        '"shape": [4, 2, 3]',
        '"data_offsets": [8, 16]',
        '"token_ids": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}',
        '"__metadata__": {"format": "skyrl-r3/1", "finish_reason": "stop"}',
    ],
)
def test_a_name_that_comes_twice(pair: str) -> None:
    """Readers differ in which of them they take."""
    header, data = _header()
    error = _refused(_document(_twice(json.dumps(header), pair).encode(), data))
    assert error.field == "frame"
    assert error.got.startswith(repr(pair.split('"')[1]))


def test_a_name_that_comes_twice_with_different_spellings() -> None:
    header, data = _header()
    pair = '"dtype": "F32"'
    text = json.dumps(header).replace(pair, f'{pair}, "\\u0064type": "F32"')
    assert _refused(_document(text.encode(), data)).field == "frame"


# Tensors.


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "routed_experts"])
@pytest.mark.parametrize("info", [None, True, 1, "x", [], {}, ["dtype", "shape", "data_offsets"]], ids=repr)
def test_a_tensor_that_is_no_object(name: str, info: Any) -> None:
    header, data = _header()
    assert _refused(_document(header | {name: info}, data)).field == name


@pytest.mark.case("R35")
@pytest.mark.parametrize("name", ["token_ids", "logprobs", "routed_experts"])
@pytest.mark.parametrize("changes", [*({key: ...} for key in ("dtype", "shape", "data_offsets")), {"x": 1}], ids=repr)
def test_other_keys_of_a_tensor(name: str, changes: dict[str, Any]) -> None:
    """No key has a default."""
    assert _refused(_with(name, **changes)).field == name


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "routed_experts"])
@pytest.mark.parametrize(
    "dtype",
    [None, True, 1, 1.5, "", "u8", "U16", "I8", "I64", "F16", "BF16", "BOOL", "int16", [], ["I16"], {}, {"I16": 1}],
    ids=repr,
)
def test_unknown_dtypes(name: str, dtype: Any) -> None:
    assert _refused(_with(name, dtype=dtype)).field == f"{name}.dtype"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("token_ids", "F32"), ("token_ids", "U32"), ("logprobs", "I32"), ("logprobs", "F64"), ("routed_experts", "F32")],
)
def test_dtypes_of_the_right_size_for_another_tensor(name: str, dtype: str) -> None:
    assert _refused(_with(name, dtype=dtype)).field == f"{name}.dtype"


NO_INTEGERS = [None, True, 2, 2.0, "2", "[2]", {}, {"2": 0}, [True], [2.0], ["2"], [None], [[2]], [-2], [-(2**70)]]


@pytest.mark.case("R46")
@pytest.mark.parametrize("name", ["token_ids", "logprobs", "routed_experts"])
@pytest.mark.parametrize("key", ["shape", "data_offsets"])
@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_shapes_and_offsets_that_are_no_integers(name: str, key: str, value: Any) -> None:
    """Bool and float dims, also one among right ones."""
    error = _refused(_with(name, **{key: value}))
    assert error.field == f"{name}.{key}"
    if isinstance(value, list):
        right = _header()[0][name][key]
        for at in range(len(right)):
            wrong = [*right[:at], *value, *right[at + 1 :]]
            assert _refused(_with(name, **{key: wrong})).field == f"{name}.{key}"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e3", "2.0", "-0.0", "1e999", "-0", "00", "01"])
def test_numbers_that_only_python_or_nobody_reads(text: str) -> None:
    """``-0`` is an integer in JSON, and is 0: here the shape is still wrong."""
    header, data = _header()
    for right, wrong in (('"shape": [2]', f'"shape": [{text}]'), ('"skyrl-r3/1"', text), ("[8, 16]", f"[8, {text}]")):
        _refused(_document(json.dumps(header).replace(right, wrong).encode(), data))


@pytest.mark.case("R46")
@pytest.mark.parametrize("name", ["token_ids", "logprobs"])
@pytest.mark.parametrize(
    "shape",
    [[], [1], [3], [0], [2, 1], [1, 2], [2, 1, 1], [2**62], [2**64], [10**300]],
    ids=lambda shape: repr(shape)[:12],
)
def test_wrong_shapes_of_vectors(name: str, shape: list[int]) -> None:
    assert _refused(_with(name, shape=shape)).field == f"{name}.shape"


@pytest.mark.case("R46")
@pytest.mark.parametrize(
    "shape",
    [[], [24], [4, 6], [4, 2, 3, 1], [2**63, 0, 8], [0, 2**64, 1], [2**32, 2**32, 1], [2**31 + 1, 1, 1],
     [10**300, 1, 1]],
    ids=lambda shape: repr(shape)[:12],
)  # fmt: skip
def test_wrong_shapes_of_routes(shape: list[int]) -> None:
    assert _refused(_with("routed_experts", shape=shape)).field == "routed_experts.shape"


@pytest.mark.parametrize("shape", [[4, 2, 2], [4, 2, 4], [5, 2, 3], [0, 2, 3], [1, 1, 1], [2**30, 1, 1]])
def test_routes_of_another_size(shape: list[int]) -> None:
    error = _refused(_with("routed_experts", shape=shape))
    assert error.field == "routed_experts"
    assert error.got == "24 bytes"


@pytest.mark.case("R35")
@pytest.mark.parametrize("dtype", ["I16", "I32"])
def test_routes_of_half_and_a_quarter_of_the_bytes(dtype: str) -> None:
    """Bytes of one dtype do not pass for another."""
    assert _refused(_with("routed_experts", dtype=dtype)).field == "routed_experts"


# Offsets. Every byte belongs to one tensor.


@pytest.mark.parametrize(
    ("tokens", "logprobs", "routes"),
    [
        pytest.param([0, 8], [8, 16], [16, 39], id="short"),
        pytest.param([0, 8], [8, 16], [16, 41], id="long"),
        pytest.param([0, 8], [8, 16], [17, 40], id="gap"),
        pytest.param([0, 8], [8, 16], [15, 40], id="overlap"),
        pytest.param([0, 8], [0, 8], [16, 40], id="shared-and-gap"),
        pytest.param([0, 8], [0, 8], [8, 40], id="shared"),
        pytest.param([0, 8], [8, 16], [0, 40], id="around-the-others"),
        pytest.param([1, 8], [8, 16], [16, 40], id="late"),
        pytest.param([8, 0], [8, 16], [16, 40], id="reversed"),
        pytest.param([0, 8], [16, 8], [16, 40], id="reversed-second"),
        pytest.param([0, 8], [8, 16], [40, 16], id="reversed-last"),
        pytest.param([0, 8], [8, 8], [8, 40], id="empty"),
        pytest.param([0, 8], [8, 2**70], [16, 40], id="huge"),
        pytest.param([0, 8], [8, 16], [16, 10**300], id="too-long-for-a-message"),
        pytest.param([0, 10**300], [10**300, 16], [16, 40], id="too-long-for-a-message-in-between"),
        pytest.param([0, 8], [8, 16], [10**300, 10**300 + 24], id="huge-begin"),
        pytest.param([0, 8], [8, 16], [2**64 + 16, 2**64 + 40], id="wrapped"),
        pytest.param([0, 8], [8, 16], [], id="none"),
        pytest.param([0, 8], [8, 16], [16], id="one"),
        pytest.param([0, 8], [8, 16], [16, 20, 40], id="three"),
    ],
)  # fmt: skip
def test_offsets_that_do_not_cover_the_bytes_once(tokens: Any, logprobs: Any, routes: Any) -> None:
    header, data = _header()
    for name, span in (("token_ids", tokens), ("logprobs", logprobs), ("routed_experts", routes)):
        header[name]["data_offsets"] = span
    _refused(_document(header, data))


def test_shapes_that_agree_with_a_wrong_span() -> None:
    """Nothing but the offsets is wrong here: two tensors share bytes, one is cut, or bytes are nobody's."""
    header, data = _header(token_ids=TOKENS, logprobs=LOGPROBS)
    header["logprobs"]["data_offsets"] = [0, 8]
    assert _refused(_document(header, data[:8])).field.endswith(".data_offsets")
    assert _refused(_document(header, data)).field.endswith(".data_offsets")
    header["logprobs"]["data_offsets"] = [16, 24]
    assert _refused(_document(header, data + bytes(8))).field == "logprobs.data_offsets"
    header["token_ids"]["data_offsets"], header["logprobs"]["data_offsets"] = [8, 16], [16, 24]
    assert _refused(_document(header, bytes(8) + data)).field == "token_ids.data_offsets"


@pytest.mark.parametrize("cut", [1, 23, 24, 25, 40])
def test_bytes_that_are_missing(cut: int) -> None:
    header, data = _header()
    assert _refused(_document(header, data[:-cut])).field.endswith(".data_offsets")


@pytest.mark.parametrize("more", [b"\0", b" ", b"\n", bytes(8), bytes(1000)], ids=repr)
def test_bytes_that_are_left_over(more: bytes) -> None:
    header, data = _header()
    assert _refused(_document(header, data + more)).field == "frame"
    header, data = _header(token_ids=TOKENS[:0])
    assert _refused(_document(header, more)).field == "frame"


def test_tensors_in_any_order() -> None:
    header, data = _header(routed_experts=IDS, logprobs=LOGPROBS, token_ids=TOKENS)
    turned = {name: header[name] for name in ("logprobs", "__metadata__", "token_ids", "routed_experts")}
    got = frame.load(_document(turned, data))
    assert got.token_ids.tolist() == TOKENS.tolist()
    assert got.routed_experts is not None
    assert got.routed_experts.tolist() == IDS.tolist()


def test_empty_tensors_may_stand_anywhere() -> None:
    none = np.empty((0, 2, 3), np.uint8)
    for arrays in (
        {"routed_experts": none, "token_ids": TOKENS, "logprobs": LOGPROBS},
        {"token_ids": TOKENS, "routed_experts": none, "logprobs": LOGPROBS},
        {"token_ids": TOKENS, "logprobs": LOGPROBS, "routed_experts": none},
    ):
        routes = frame.load(_document(*_header(**arrays))).routed_experts
        assert routes is not None
        assert routes.shape == (0, 2, 3)


# Values.


@pytest.mark.case("R20", "R22")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logprobs_that_are_no_numbers(value: float) -> None:
    """The server floors them, so that one that arrives is a fault."""
    wrong = np.array([-0.5, value], np.float32)
    assert _refused(_document(*_header(token_ids=TOKENS, logprobs=wrong, routed_experts=IDS))).field == "logprobs"


@pytest.mark.parametrize("size", [0, 1, 3])
def test_another_number_of_logprobs(size: int) -> None:
    wrong = np.zeros(size, np.float32)
    assert _refused(_document(*_header(token_ids=TOKENS, logprobs=wrong, routed_experts=IDS))).field == "logprobs"


@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_negative_token_ids(value: int) -> None:
    wrong = np.array([1, value], np.int32)
    error = _refused(_document(*_header(token_ids=wrong)))
    assert (error.field, error.got) == ("token_ids", str(value))


@pytest.mark.case("R10")
@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_negative_ids(dtype: str) -> None:
    wrong = np.full((2, 1, 2), 300, dtype)
    wrong[1, 0, 1] = -1
    error = _refused(_document(*_header(token_ids=TOKENS, routed_experts=wrong)))
    assert (error.field, error.got, error.where) == ("routed_experts", "-1", "row 1, layer 0, slot 1")


@pytest.mark.parametrize(("largest", "dtype"), [(255, "int16"), (255, "int32"), (32767, "int32"), (0, "int16")])
def test_a_wider_dtype_than_needed(largest: int, dtype: str) -> None:
    """One array has one encoding."""
    error = _refused(_document(*_header(token_ids=TOKENS, routed_experts=np.full((4, 1, 1), largest, dtype))))
    assert error.field == "routed_experts.dtype"
    none = np.empty((0, 1, 1), dtype)
    assert _refused(_document(*_header(token_ids=TOKENS, routed_experts=none))).field == "routed_experts.dtype"


# Fuzzing: whatever the bytes, a reply that safetensors reads as well, or a ReplyError, and no room for either.


def _attempt(body: bytes) -> Reply | R3Error:
    try:
        return frame.load(body)
    except R3Error as error:
        return error


def _check(body: bytes) -> bool:
    """Whether ``body`` is a reply."""
    reply = _attempt(body)
    if isinstance(reply, R3Error):
        assert isinstance(reply, ReplyError)
        assert len(str(reply)) < 1_000
        return False
    theirs = safetensors.numpy.load(body)
    for name in ("token_ids", "logprobs", "routed_experts"):
        ours, other = getattr(reply, name), theirs.get(name)
        assert (ours is None) is (other is None)
        if ours is not None and other is not None:
            assert (ours.dtype, ours.shape, ours.tobytes()) == (other.dtype, other.shape, other.tobytes())
    assert reply.token_ids.min(initial=0) >= 0
    assert reply.logprobs is None or len(reply.logprobs) == len(reply.token_ids)
    if reply.routed_experts is not None:
        _assert_routes(reply.routed_experts, reply.routed_experts.astype(np.int64))
    spec = reply.spec
    for number in (reply.prompt_tokens, reply.start, spec.num_experts, spec.topk, spec.layers):
        assert number is None or 0 <= number < 10**10
    if spec.moe_layers is not None:
        assert list(spec.moe_layers) == sorted(set(spec.moe_layers))
        assert 0 <= spec.moe_layers[0] <= spec.moe_layers[-1] < min(4096, 4096 if spec.layers is None else spec.layers)
    return True


SPEC = RouteSpec(num_experts=128, topk=3, layers=9, moe_layers=(0, 2, 3, 7))
BODIES = [
    frame.dump(_reply(prompt_tokens=3, start=0, spec=SPEC, model="m")),
    frame.dump(_reply(routed_experts=np.full((1, 1, 2), 300), logprobs=None)),
    frame.dump(_reply(routed_experts=None)),
    _document(*_header()),
]


@pytest.mark.parametrize("body", BODIES, ids=["all", "int16", "no-routes", "by-hand"])
def test_every_cut(body: bytes) -> None:
    assert _check(body)
    assert not any(_check(body[:at]) for at in range(len(body)))
    assert not any(_check(body[at:]) for at in range(1, len(body)))


def test_every_byte_of_a_header_changed_to_every_other() -> None:
    body = BODIES[1]
    (size,) = struct.unpack("<Q", body[:8])
    survivors = sum(
        _check(body[:at] + bytes([value]) + body[at + 1 :])
        for at in range(8 + size)
        for value in range(256)
        if value != body[at]
    )
    # Changed names of metadata that we do not need, and changed values, cannot be seen here.
    assert survivors


@pytest.mark.parametrize("body", BODIES, ids=["all", "int16", "no-routes", "by-hand"])
def test_every_flipped_bit_and_every_lost_byte(body: bytes) -> None:
    for at in range(len(body)):
        _check(body[:at] + body[at + 1 :])
        for bit in range(8):
            _check(body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :])


@given(st.data())
def test_a_mutated_frame(data: st.DataObject) -> None:
    _check(data.draw(corruption.bytes_of(data.draw(st.sampled_from(BODIES)))))


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_any_bytes(text: bytes, data: bytes) -> None:
    for body in (text, data, _document(text, data)):
        _check(body)


JSON = r3st.json_values()
OFFSETS = st.integers(-1, 12)
TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "I16", "I32", "F32"]) | JSON,
        "shape": st.lists(st.integers(0, 3), max_size=4) | JSON,
        "data_offsets": st.tuples(OFFSETS, OFFSETS).map(sorted) | st.lists(OFFSETS, max_size=3) | JSON,
    }
)
HEADER = st.fixed_dictionaries(
    {
        "__metadata__": st.just({"format": "skyrl-r3/1"})
        | st.fixed_dictionaries({"format": st.just("skyrl-r3/1"), "start": st.text(max_size=3) | JSON})
        | JSON,
        "token_ids": TENSOR | st.just({"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}),
    },
    optional={
        "logprobs": TENSOR | st.just({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}),
        "routed_experts": TENSOR | JSON,
        "x": TENSOR | JSON,
    },
)


@given(HEADER | JSON, st.binary(max_size=12))
def test_any_header(header: Any, data: bytes) -> None:
    _check(_document(header, data))


@pytest.mark.case("R46")
@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2**28, 1, 1]},
        {"shape": [2**31, 1, 1]},
        {"shape": [2**20, 2**20, 2**20]},
        {"shape": [0, 2**60, 1]},
        {"shape": [2**28, 1, 1], "data_offsets": [16, 16 + 2**28]},
        {"shape": [2**28, 1, 1], "data_offsets": [16, 40]},
    ],
    ids=repr,
)
def test_a_claimed_size_is_not_allocated(changes: dict[str, Any]) -> None:
    body = _with("routed_experts", **changes)
    _refused(body)
    tracemalloc.start()
    try:
        _refused(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(struct.pack("<Q", 2**62) + b"{}", id="length"),
        pytest.param(_document(b"[" * 2**16), id="deep"),
        pytest.param(_document(b"[" + b"0," * 2**14 + b"0]"), id="wide"),
        pytest.param(_document(b'{"a":' + b"9" * 2**15 + b"}"), id="digits"),
        pytest.param(_document(b'{"' + b"a" * 2**15 + b'":0}'), id="name"),
        pytest.param(_document(b"{}" + b" " * 100, bytes(10_000_000)), id="data"),
    ],
)
def test_what_is_refused_takes_no_room(body: bytes) -> None:
    _refused(body)
    tracemalloc.start()
    try:
        _refused(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


# Telling a frame from JSON.


@given(r3st.reply_fields())
def test_what_is_written_looks_like_a_frame(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    assert frame.is_frame(frame.dump(Reply(**made[0])))


@given(r3st.json_values(st.text(max_size=4) | st.integers() | st.floats()), st.sampled_from([None, 0, 7]))
def test_json_never_looks_like_a_frame(value: Any, indent: int | None) -> None:
    for text in (json.dumps(value, indent=indent), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
        assert not frame.is_frame(text.encode(errors="surrogatepass"))
        assert not frame.is_frame((" " * 10 + text).encode(errors="surrogatepass"))


@pytest.mark.parametrize("body", [b"", b"\0" * 7, b"1234567", b'{"choices":[]}', b"<html></html>"], ids=repr)
def test_what_is_no_frame(body: bytes) -> None:
    assert not frame.is_frame(body)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_frames_in_other_buffers(kind: type) -> None:
    assert frame.is_frame(kind(BODIES[0]))
