"""Tensors of every device, layout and dtype into the codec, and nothing asked of a device but one copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_tests import devices, models, routers
from gpu_tests.transformers_engine import load_network
from skyrl_r3 import codec, frame, packed
from skyrl_r3.hooks import server
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec

ROWS, LAYERS, TOPK = 7, 5, 4
DTYPES = ["uint8", "int16", "uint16", "int32", "int64"]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda ids: ids,
    "layers first": lambda ids: ids.transpose(0, 1).contiguous().transpose(0, 1),
    "slots first": lambda ids: ids.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "every second slot": lambda ids: torch.stack([ids, torch.zeros_like(ids)], dim=-1).flatten(2)[..., ::2],
    "rows of a longer buffer": lambda ids: torch.cat([ids, ids, ids])[ROWS : 2 * ROWS],
    "one row, expanded": lambda ids: ids[:1].expand(ROWS, -1, -1),
    "pinned": lambda ids: ids.pin_memory(),
}


# Only the host's memory can be pinned, and only where there is a device to pin it for.
PLACES = [("cpu", name) for name in LAYOUTS] + [("cuda", name) for name in LAYOUTS if name != "pinned"]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        devices.require_gpu()
    return request.param


@pytest.fixture(params=PLACES, ids="-".join)
def place(request: pytest.FixtureRequest) -> Callable[[str], torch.Tensor]:
    """dtype -> ids of it, on a device and in a layout."""
    device, layout = request.param
    if device == "cuda" or layout == "pinned":
        devices.require_gpu()

    def make(dtype: str) -> torch.Tensor:
        # Laid out as int16, as torch has next to no operations for uint16.
        ids = ids_of(dtype)
        signed = ids.view(torch.int16) if dtype == "uint16" else ids
        return LAYOUTS[layout](signed.to(device)).view(ids.dtype)

    return make


def ids_of(dtype: str) -> torch.Tensor:
    """``[rows, layers, topk]``, with the largest id that fits."""
    largest = min(torch.iinfo(getattr(torch, dtype)).max, 2**31 - 1)
    ids = torch.arange(ROWS * LAYERS * TOPK, dtype=torch.int64).reshape(ROWS, LAYERS, TOPK)
    ids[0, 0, 0] = largest
    return ids.to(getattr(torch, dtype))


def reply_of(routes: Any) -> Reply:
    """As the server's hook makes it of what the engine returned."""
    completion = SimpleNamespace(
        token_ids=[1], logprobs=[{1: SimpleNamespace(logprob=-0.5)}], finish_reason="length", routed_experts=routes
    )
    request = {"token_ids": [0] * ROWS, "sampling_params": {}, "model": "m"}
    return server._reply(SimpleNamespace(outputs=[completion]), request, RouteSpec())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_and_dtype_arrives(place: Callable[[str], torch.Tensor], dtype: str) -> None:
    tensor = place(dtype)
    expected = np.array(tensor.cpu().tolist(), dtype=np.int64)
    largest = int(expected.max())
    canonical = "uint8" if largest < 2**8 else "int16" if largest < 2**15 else "int32"
    arrived = {
        "compact": codec.compact(tensor),
        "packed": codec.unpack(codec.pack(tensor)),
        "frame": frame.load(frame.dump(reply_of(tensor))).routed_experts,
        "packed reply": packed.read(packed.parse(packed.dump(reply_of(tensor))))[0].routed_experts,
    }
    for way, ids in arrived.items():
        assert ids is not None, way
        assert (ids.dtype, ids.shape) == (np.dtype(canonical), expected.shape), way
        assert np.array_equal(ids, expected), way


def test_no_memory_is_shared_with_the_tensor(place: Callable[[str], torch.Tensor]) -> None:
    """The engine may write its buffer again before the reply is sent."""
    tensor = place("uint8")
    arrays = [codec.compact(tensor), reply_of(tensor).routed_experts]
    before = np.array(tensor.cpu().tolist())
    (tensor[0] if tensor.stride(0) == 0 else tensor).fill_(9)
    for ids in arrays:
        assert ids is not None
        assert np.array_equal(ids, before)


def test_the_ids_of_a_bfloat16_model(device: str, tmp_path: Any) -> None:
    """As its routers return them: int64, on its device, one tensor for each layer."""
    model = models.make("many-experts", tmp_path / "model")
    network = load_network(model, device=device, dtype=torch.bfloat16)
    assert network.dtype == torch.bfloat16
    with torch.inference_mode(), routers.recorded(network, model.spec) as used:
        network(input_ids=torch.arange(100, device=device)[None])
        layers = [ids for (ids,) in used.values()]
        stacked = torch.stack(layers).transpose(0, 1)
        ids = codec.compact(stacked)
    assert (stacked.dtype, stacked.device.type, stacked.is_contiguous()) == (torch.int64, device, False)
    assert ids.dtype == np.int16
    assert ids.shape == (100, model.spec.layers, model.spec.topk)
    for layer, chosen in enumerate(layers):
        assert ids[:, layer].tolist() == chosen.tolist()


# What is asked of a device.

WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "compact": codec.compact,
    "pack": codec.pack,
    "packed_pieces": codec.packed_pieces,
    "frame": lambda ids: frame.pieces(reply_of(ids)),
    "packed reply": lambda ids: packed.pieces(reply_of(ids)),
}


@pytest.mark.parametrize("way", WAYS)
def test_torch_runs_nothing_but_one_copy(place: Callable[[str], torch.Tensor], way: str) -> None:
    """All else is numpy's, on memory of the host."""
    for dtype in DTYPES:
        tensor = place(dtype)
        with devices.Operations() as operations:
            WAYS[way](tensor)
        copies = [] if tensor.device.type == "cpu" else ["_to_copy"]
        assert [name for name in operations.names if name not in ("detach", "alias")] == copies, dtype


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pinned"])
def test_cuda_is_waited_for_once(layout: str, way: str) -> None:
    devices.require_gpu()
    tensor = LAYOUTS[layout](ids_of("int64").to("cuda"))
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            WAYS[way](tensor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in caught if "called a synchronizing" in str(each.message)]) == 1


class Device:
    """A tensor that is somewhere else, of which only its way to the host is known."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids
        self.asked: list[str] = []

    def detach(self) -> Device:
        self.asked.append("detach")
        return self

    def cpu(self) -> torch.Tensor:
        self.asked.append("cpu")
        return self._ids


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_elsewhere_is_asked_for_one_copy_and_nothing_else(way: str) -> None:
    """Not for its shape, its length or its largest id, before it is here."""
    elsewhere: Any = Device(ids_of("int64"))
    WAYS[way](elsewhere)
    assert elsewhere.asked == ["detach", "cpu"]


# The tools of these tests.


def test_what_reads_a_value_is_seen() -> None:
    with devices.Operations() as operations:
        assert torch.arange(3).max().item() == 2
    assert operations.names[-2:] == ["max", "_local_scalar_dense"]


def test_a_missing_gpu_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(devices.REQUIRE_GPU, raising=False)
    # Either is caught, as a skip that nobody expects would skip this test.
    outcomes = (pytest.skip.Exception, pytest.fail.Exception)
    with pytest.raises(outcomes) as skipped:
        devices.require_gpu()
    monkeypatch.setenv(devices.REQUIRE_GPU, "1")
    with pytest.raises(outcomes) as failed:
        devices.require_gpu()
    assert (skipped.type, failed.type) == outcomes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices.require_gpu()
