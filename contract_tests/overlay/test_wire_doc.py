"""``docs/wire.md`` says what the code does: its example is a golden file, its tables are the code's, and the decoder in
it, which was written from it alone, reads and refuses what the oracle does.
"""

from __future__ import annotations

import json
import re
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import corruption, golden, oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import FRAME, NESTED, PACKED, Reply
from contract_tests.child import REPO
from contract_tests.codec.test_bodies import BODIES, DEEP, OTHER_FRAMES, WRONG_FRAMES, frames
from skyrl_r3 import codec, frame, packed, spec, wire
from skyrl_r3.errors import ReplyError
from skyrl_r3.hooks.engine import check_start
from skyrl_r3.reply import FLOORED_LOGPROB
from skyrl_r3.reply import Reply as Ours

DOCUMENT = (REPO / "docs" / "wire.md").read_text("utf-8")
EXAMPLE = next(case for case in golden.read("v1") if case.name == "told")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


def table(*headings: str) -> list[list[str]]:
    """The rows below the one table with such headings, without backticks."""
    head = "| " + " | ".join(headings) + " |\n"
    assert DOCUMENT.count(head) == 1
    lines = DOCUMENT.split(head)[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def section(heading: str) -> str:
    (text,) = re.findall(rf"\n## {heading}\n(.*?)\n## ", DOCUMENT, re.DOTALL)
    return text


# The example


def test_the_dump_is_the_golden_frame() -> None:
    (dump,) = blocks("text")
    lines = [re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} )+)", line) for line in dump.splitlines()]
    body = b""
    for line in lines:
        assert line is not None
        assert int(line[1], 16) == len(body)
        body += bytes.fromhex(line[2])
    assert body == EXAMPLE.bodies[FRAME]
    # What stands behind the bytes.
    shown = "".join(re.findall(r"\|(.*)\|$", dump, re.MULTILINE))
    header = body[8 : 8 + int.from_bytes(body[:8], "little")]
    assert shown == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in header)
    reply = EXAMPLE.reply
    assert f"length of the header, {len(header)}\n" in dump
    assert f"token_ids: {', '.join(map(str, reply.token_ids))}\n" in dump
    assert f"logprobs: {', '.join(map(str, reply.logprobs or ()))}\n" in dump


def test_the_json_is_the_golden_files() -> None:
    _, for_packed, for_nested = blocks("json")
    assert for_packed.rstrip("\n").encode() == EXAMPLE.bodies[PACKED]
    assert for_nested.rstrip("\n").encode() == EXAMPLE.bodies[NESTED]


def test_sizes_that_are_told() -> None:
    assert f"as a frame, {len(EXAMPLE.bodies[FRAME])} bytes:" in DOCUMENT
    assert f"Packed, {len(EXAMPLE.bodies[PACKED])} bytes:" in DOCUMENT


def test_the_request_explains_the_reply() -> None:
    request = json.loads(blocks("json")[0])
    check_start(request)
    assert wire.choose_encoding(request[wire.ENCODINGS_FIELD], [frame.FRAME]) == FRAME
    start, prompt = request["sampling_params"][wire.START_FIELD], len(request["token_ids"])
    reply = frame.load(EXAMPLE.bodies[FRAME])
    assert len(reply.routes_for(prompt=prompt, start=start)) == 3
    assert (reply.prompt_tokens, reply.start, reply.model) == (prompt, start, request["model"])
    assert f"{prompt} + {len(reply.token_ids)} - 1 - {start} = {reply.rows} rows" in DOCUMENT


# The tables


def test_encodings() -> None:
    rows = table("encoding", "content type", "where it comes from")
    assert tuple(name for name, *_ in rows) == wire.ENCODINGS
    assert rows[0][1] == frame.CONTENT_TYPE
    assert [row[0] for row in table("field", "form", "without it")] == [
        wire.ENCODINGS_FIELD,
        f"sampling_params.{wire.START_FIELD}",
    ]
    assert f"`POST {wire.GENERATE_PATH}`" in DOCUMENT


def test_dtypes() -> None:
    rows = table("in JSON", "in a frame", "ids up to", "bytes")
    assert [name for name, *_ in rows] == list(codec.DTYPES)
    for i, (name, code, most, item_bytes) in enumerate(rows):
        for largest, wanted in ((int(most), name), (int(most) + 1, rows[i + 1][0] if i + 1 < len(rows) else None)):
            ids = np.full((1, 1, 1), largest, np.int64)
            if wanted is None:
                with pytest.raises(codec.CodecError):
                    codec.pack(ids)
            else:
                assert codec.pack(ids)["dtype"] == wanted
        body = frame.dump(ours(routed_experts=np.full((1, 1, 1), int(most), np.int64)))
        info = header_of(body)["routed_experts"]
        assert info["dtype"] == code
        assert info["data_offsets"][1] - info["data_offsets"][0] == int(item_bytes)


def ours(**fields: Any) -> Ours:
    return Ours(**{"token_ids": np.array([5], np.int32), "finish_reason": None, "logprobs": None} | fields)


def header_of(body: bytes) -> dict[str, Any]:
    return json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])


def test_tensors_and_metadata() -> None:
    """All keys, in the order in which they are written, and which of them a writer may leave out."""
    full = ours(
        finish_reason="stop",
        logprobs=np.zeros(1, np.float32),
        routed_experts=np.zeros((0, 4, 2), np.uint8),
        prompt_tokens=1,
        start=1,
        model="m",
        spec=spec.RouteSpec(layers=4, topk=2, num_experts=8, moe_layers=(0, 1, 3)),
    )
    header, least = header_of(frame.dump(full)), header_of(frame.dump(ours(routed_experts=None)))
    tensors, keys = table("tensor", "dtype", "shape", "what"), table("key", "form", "what")
    assert list(header) == ["__metadata__", *(name for name, *_ in tensors)]
    assert list(header["__metadata__"]) == [name for name, *_ in keys]
    assert set(least) == {"__metadata__", *(name for name, _, _, what in tensors if what.startswith("required"))}
    assert set(least["__metadata__"]) == {name for name, _, what in keys if what == "required"}
    assert [form for name, form, _ in keys if name == "format"] == [frame.FORMAT]
    assert header["__metadata__"]["moe_layers"] == "0-1,3"
    for name, code, *_ in tensors[:2]:
        assert header[name]["dtype"] == code


def test_limits() -> None:
    told = section("What a reader has to refuse")
    assert f"more than {codec.MAX_BYTES} bytes" in told
    assert f"not below {spec.MAX_LAYERS}." in told
    (most,) = map(int, re.findall(r"longer than (\d+) bytes", told))
    body = frame.dump(ours(routed_experts=None))
    size = int.from_bytes(body[:8], "little")
    for length, fits in ((most, True), (most + 8, False)):
        padded = length.to_bytes(8, "little") + body[8 : 8 + size].ljust(length) + body[8 + size :]
        if fits:
            frame.load(padded)
            DECODER["decode"](padded)
        else:
            with pytest.raises(ReplyError):
                frame.load(padded)
            with pytest.raises(ValueError, match="length of the header"):
                DECODER["decode"](padded)


def test_floor() -> None:
    assert f"not finite as float32 by {FLOORED_LOGPROB}." in section("The reply")


def test_order_of_packed_json() -> None:
    """The template of the document is what is written, and the bytes that SkyRL 0.4.0 looks for are in it."""
    template, envelope = re.search(r"^    (\{\"choices.*)$", DOCUMENT, re.M), re.search(r"packed: `(.*?)`", DOCUMENT)
    assert template is not None
    assert envelope is not None
    body = packed.dump(ours(routed_experts=np.zeros((3, 1, 2), np.uint8))).decode()
    (anchor,) = re.findall(r"looks for the bytes `(.*?)`", DOCUMENT)
    assert anchor in body
    assert re.findall(r'"(\w+)":', body) == re.findall(r'"(\w+)":', template[1] + envelope[1])


# The decoder


def decoder() -> dict[str, Any]:
    """What the block defines. It may import the standard library alone."""
    (source,) = blocks("python")
    assert set(re.findall(r"^(?:import|from) (\w+)", source, re.M)) == {"json", "math", "re", "struct"}
    namespace: dict[str, Any] = {}
    exec(compile(source, "docs/wire.md", "exec"), namespace)
    return namespace


DECODER = decoder()
_DTYPES = {"U8": "uint8", "I16": "int16", "I32": "int32"}


def read(body: bytes) -> Reply | None:
    """What the document's decoder reads, or None where it refuses."""
    try:
        told, tensors = DECODER["decode"](body)
    except ValueError:
        return None
    values = {name: list(flat) for name, (_, _, flat) in tensors.items()}
    routes = None
    if "routed_experts" in tensors:
        code, shape, flat = tensors["routed_experts"]
        routes = np.array(flat, _DTYPES[code]).reshape(shape)
    known = {name: told[name] for name in ("prompt_tokens", "start", "num_experts", "layers") if name in told}
    known |= {"model": told["model"]} if told.get("model") else {}
    known |= {"moe_layers": tuple(told["moe_layers"])} if "moe_layers" in told else {}
    return Reply(values["token_ids"], told.get("finish_reason"), values.get("logprobs"), routes, known)


def assert_as_the_oracle(body: bytes) -> None:
    try:
        want = oracle.read(body) if body[7:8] == b"\0" else None
    except oracle.UnreadableError:
        want = None
    found = read(body)
    assert (found is None) == (want is None), f"{'refused' if found is None else 'read'}: {body!r}"
    if found is not None and want is not None:
        same = (found.token_ids, found.finish_reason, found.logprobs, found.metadata)
        assert same == (want.token_ids, want.finish_reason, want.logprobs, want.metadata)
        assert (found.routes is None) == (want.routes is None)
        if found.routes is not None and want.routes is not None:
            assert (found.routes.dtype, found.routes.shape) == (want.routes.dtype, want.routes.shape)
            assert found.routes.tolist() == want.routes.tolist()


@pytest.mark.parametrize("case", golden.read("v1"), ids=lambda case: case.name)
def test_the_decoder_reads_golden_frames(case: golden.Golden) -> None:
    assert read(case.bodies[FRAME]) is not None
    assert_as_the_oracle(case.bodies[FRAME])


@pytest.mark.parametrize("kind", OTHER_FRAMES)
def test_the_decoder_reads_what_others_write(kind: str) -> None:
    assert read(OTHER_FRAMES[kind]) is not None
    assert_as_the_oracle(OTHER_FRAMES[kind])


@pytest.mark.parametrize("kind", WRONG_FRAMES)
def test_the_decoder_refuses_wrong_frames(kind: str) -> None:
    assert read(WRONG_FRAMES[kind]) is None


def _edges() -> dict[str, tuple[bytes, bool]]:
    """Frames at a limit, and whether they are within it."""
    empty = {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}

    def made(layers: int = 1, model: str = "m") -> bytes:
        routes = {"dtype": "U8", "shape": [0, layers, 1], "data_offsets": [0, 0]}
        told = {"format": frame.FORMAT, "model": model}
        header = {"__metadata__": told, "token_ids": empty, "routed_experts": routes}
        return oracle.frame(json.dumps(header).encode(), b"")

    return {
        "as many bytes as routes may have": (made(layers=2**31), True),
        "one more": (made(layers=2**31 + 1), False),
        "a pair of surrogates": (made(model="\N{SNAKE}"), True),
        "half of it": (made(model="\ud83d"), False),
    }


@pytest.mark.parametrize("kind", _edges())
def test_the_decoder_at_the_limits(kind: str) -> None:
    body, fits = _edges()[kind]
    assert (read(body) is not None) is fits
    assert_as_the_oracle(body)


class Claimed:
    """Bytes of which there are as many as is claimed, and none."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Claimed:
        return Claimed(part.stop - part.start)


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "routed_experts"])
def test_the_bound_is_of_routes_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic: nothing is read here, as that would take gigabytes."""
    monkeypatch.setitem(DECODER, "struct", SimpleNamespace(calcsize=struct.calcsize, unpack=lambda *_: ()))
    code = {"token_ids": "I32", "logprobs": "F32", "routed_experts": "U8"}[name]
    routes = name == "routed_experts"
    for size, fits in ((codec.MAX_BYTES, True), (codec.MAX_BYTES + 4, not routes)):
        info = {"dtype": code, "shape": [size, 1, 1] if routes else [size // 4], "data_offsets": [0, size]}
        if fits:
            assert DECODER["tensor"](name, info, Claimed(size))[1] == info["shape"]
        else:
            with pytest.raises(ValueError, match="too large"):
                DECODER["tensor"](name, info, Claimed(size))


@pytest.mark.parametrize("kind", DEEP)
def test_the_decoder_refuses_deep_headers(kind: str) -> None:
    assert read(oracle.frame(DEEP[kind].encode(), b"")) is None


@given(reply=r3st.replies())
def test_the_decoder_reads_any_reply(reply: Reply) -> None:
    assert_as_the_oracle(oracle.write(reply, FRAME))


@r3st.more(3)
@given(body=frames())
def test_the_decoder_and_accidents_of_structure(body: bytes) -> None:
    assert_as_the_oracle(body)


@r3st.more(3)
@given(body=st.sampled_from(BODIES[FRAME]).flatmap(corruption.bytes_of))
def test_the_decoder_and_accidents_of_bytes(body: bytes) -> None:
    assert_as_the_oracle(body)
