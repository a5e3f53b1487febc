"""The ways in which a server, or what lies before it, delivers a reply."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from contract_tests.corruption import fed
from contract_tests.http.exchange import Answer

Delivery = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


def delivering(fault: Delivery, body: bytes, kind: str = "") -> Answer:
    """An answer that delivers ``body`` in the way of ``fault``. One with a ``kind`` is counted as corrupted."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await fault(request, fed(kind, body) if kind else body)

    return answer


def _transport(request: web.Request) -> asyncio.Transport:
    assert isinstance(request.transport, asyncio.Transport)
    return request.transport


def _in_pieces(size: int, pause_s: float = 0.0) -> Delivery:
    async def deliver(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for start in range(0, len(body), size):
            await response.write(body[start : start + size])
            await asyncio.sleep(pause_s)
        await response.write_eof()
        return response

    return deliver


async def _trickling(request: web.Request, body: bytes) -> web.StreamResponse:
    return await _in_pieces(-(-len(body) // 10), 0.02)(request, body)


def _compressed(coding: web.ContentCoding) -> Delivery:
    async def deliver(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.Response(body=body)
        # A server does not send what the client has not said that it reads.
        if coding.value in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(coding)
        return response

    return deliver


def _typed(content_type: str) -> Delivery:
    async def deliver(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": content_type})

    return deliver


def raw(*pieces: bytes, reset: bool = False) -> Answer:
    """An answer of these very bytes on the connection, which then ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        transport = _transport(request)
        for piece in pieces:
            transport.write(piece)
        if reset:
            transport.abort()
        else:
            transport.close()
        return web.Response()

    return answer


def _raw(make: Callable[[bytes], Sequence[bytes]], *, reset: bool = False) -> Delivery:
    async def deliver(request: web.Request, body: bytes) -> web.StreamResponse:
        return await raw(*make(body), reset=reset)(request)

    return deliver


def _head(*fields: str) -> bytes:
    return "\r\n".join(("HTTP/1.1 200 OK", "Content-Type: application/json", *fields, "", "")).encode()


def _sized(body: bytes, size: int) -> bytes:
    return _head(f"Content-Length: {size}") + body


def _zipped(body: bytes) -> bytes:
    return _head("Content-Encoding: gzip", f"Content-Length: {len(body)}") + body


def _chunk(body: bytes, size: int | None = None) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body) if size is None else size, body)


def _half(body: bytes) -> bytes:
    return body[: len(body) // 2]


async def _reset_in_mid_body(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(_half(body))
    # What has not been read when the connection is reset is lost, and the client would see no body at all.
    await asyncio.sleep(0.01)
    _transport(request).abort()
    return response


def _flipped(body: bytes) -> bytes:
    at = len(body) // 2
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


HARMLESS: dict[str, Delivery] = {
    "1-byte chunks": _in_pieces(1),
    "7-byte chunks": _in_pieces(7),
    "64 KiB chunks": _in_pieces(2**16),
    "slow": _trickling,
    "gzip": _compressed(web.ContentCoding.gzip),
    "deflate": _compressed(web.ContentCoding.deflate),
    "as text-html": _typed("text/html; charset=utf-8"),
    "as text in latin-1": _typed("text/plain; charset=latin-1"),
    "as JSON": _typed("application/json"),
    "as a frame": _typed("application/vnd.skyrl-r3.frame"),
    "as octets": _typed("application/octet-stream"),
    "without a type": _raw(lambda body: [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body]),
    "until the connection ends": _raw(lambda body: [_head("Connection: close"), body]),
    "connection closed after it": _raw(lambda body: [_sized(body, len(body))]),
}
"""The whole reply, in another way than usual."""

LOST: dict[str, Delivery] = {
    "less than its length": _raw(lambda body: [_sized(_half(body), len(body))]),
    "one byte less than its length": _raw(lambda body: [_sized(body[:-1], len(body))]),
    "no byte of the body": _raw(lambda body: [_sized(b"", len(body))]),
    "chunks without the last": _raw(lambda body: [_head("Transfer-Encoding: chunked"), _chunk(body)]),
    "half of a chunk": _raw(lambda body: [_head("Transfer-Encoding: chunked"), _chunk(_half(body), len(body))[:-2]]),
    "closed before the headers": _raw(lambda body: []),
    "reset before the headers": _raw(lambda body: [], reset=True),
    "closed in mid headers": _raw(lambda body: [_sized(body, len(body))[:40]]),
    "reset in mid body": _reset_in_mid_body,
}
"""The connection ends before the reply does, and the client can tell."""

SPOILT: dict[str, Delivery] = {
    "gzip cut in half": _raw(lambda body: [_zipped(_half(gzip.compress(body)))]),
    "gzip without its end": _raw(lambda body: [_zipped(gzip.compress(body)[:-8])]),
    "gzip without the last byte": _raw(lambda body: [_zipped(gzip.compress(body)[:-1])]),
    "gzip with a flipped bit": _raw(lambda body: [_zipped(_flipped(gzip.compress(body)))]),
    "gzip by name alone": _raw(lambda body: [_zipped(body)]),
    "half of it until the connection ends": _raw(lambda body: [_head("Connection: close"), _half(body)]),
    "more than its length": _raw(lambda body: [_sized(body, len(body) // 2)]),
    "a chunk shorter than it says": _raw(
        lambda body: [_head("Transfer-Encoding: chunked"), _chunk(body, len(body) + 9), _chunk(b"")]
    ),
    "a chunk longer than it says": _raw(
        lambda body: [_head("Transfer-Encoding: chunked"), _chunk(body, len(body) // 2), _chunk(b"")]
    ),
    "no HTTP": _raw(lambda body: [body]),
    "two lengths": _raw(lambda body: [_head("Content-Length: 9", f"Content-Length: {len(body)}"), body]),
}
"""Something is wrong on the way that a client may take for a lost connection or for a wrong reply."""


def nowhere() -> str:
    """An address on this machine where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/"


def redirecting(status: int, location: str | None) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {} if location is None else {"Location": location}
        return web.Response(status=status, text="<html>moved</html>", headers=headers)

    return answer
