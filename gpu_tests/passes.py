"""The same generation through stock SkyRL and through the overlay, in every encoding, and what differs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpu_tests.facts import Facts, Parity
from skyrl_r3 import wire

ENCODINGS = {"nested": "stock", "packed": "overlay", "frame": "overlay"}
"""What replies are in, and whose server sends them so."""
READ: dict[str, set[str]] = {"nested": set(), "packed": {wire.PACKED}, "frame": {wire.FRAME}}
"""What the overlay's client has read of them."""
PASS_S = 540


class Passes:
    """A scenario's passes, by encoding: ``nested`` is stock SkyRL."""

    def __init__(self, served: Any, facts: Facts) -> None:
        from skyrl.utils.tok import get_tokenizer

        self.served, self.facts = served, facts
        self.tokenizer = get_tokenizer(str(served.model.path), padding_side="left")
        self.runs: dict[str, Any] = {}

    def one(self, encoding: str, work: Callable[[Any], Awaitable[None]], *, again: bool) -> Any:
        """Do ``work`` in one encoding; returns what was recorded."""
        from demo_client import Demo
        from demo_compare import Run

        from gpu_tests.vllm_engine import NAME, overlay

        url = self.served.urls[ENCODINGS[encoding]]
        demo = Demo(proxy_url=url, server_url=url, model_name=NAME, tokenizer=self.tokenizer)
        recorder = self.served.recorder
        recorder.begin(again=again)
        read: set[str] = set()
        load = wire.load

        def noted(body: bytes) -> Any:
            reply, found = load(body)
            read.add(found)
            return reply, found

        with overlay(on=encoding != "nested"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "load", noted)
            if encoding == "packed":
                # What a client asks for whose server knows no frames.
                patch.setattr(wire, "ENCODINGS", (wire.PACKED, wire.NESTED))
            try:
                asyncio.run(asyncio.wait_for(work(demo), PASS_S))
            except Exception as error:
                raise recorder.failed or error from error
        # Nested lists would be read in the place of packed ones, and be equal.
        assert read == READ[encoding], f"replies in the pass for {encoding}: expected {READ[encoding]}, got {read}"
        return Run(demo.recorder.cases, demo.recorder.arrays)

    def compare(self, case: str, work: Callable[[Any], Awaitable[None]]) -> None:
        """Generate in stock SkyRL, do the same in the other encodings, and compare."""
        from demo_compare import FRAME, JSON, compare_case

        self.runs = {encoding: self.one(encoding, work, again=encoding != "nested") for encoding in ENCODINGS}
        layers = self.served.model.spec.moe_layers
        found = []
        for encoding, content_type in (("packed", JSON), ("frame", FRAME)):
            stock, ours = self.runs["nested"], self.runs[encoding]
            differences = compare_case(case, stock, ours, "0.3", content_type=content_type, layers=layers)
            found += [f"{encoding}: {difference}" for difference in differences]
        assert not found, "\n".join(found)  # pytest does not show what an assertion outside of test files compares.

    def stops(self, case: str) -> list[str]:
        """Why each reply of the case ended."""
        return self.runs["nested"].cases[case]["stop_reasons"]

    def passed(self, case: str, seen: str) -> None:
        """Keep for the report that the case was equal, and what was ``seen`` that makes it the case it is."""
        replies = [
            ids for name, ids in self.runs["nested"].of(case).items() if name.startswith("reply|") and "routes" in name
        ]
        rows = sum(len(ids) for ids in replies)
        self.facts.parities.append(
            Parity(scenario=case, model=self.served.model.name, replies=len(replies), rows=rows, seen=seen)
        )
