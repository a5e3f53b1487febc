"""Wrong routes in real traffic: what becomes of the sample, of its neighbours, and of the count.

SkyRL's real handler and client, over a socket. The engine is a double that plants the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import skyrl_r3
from contract_tests import canned
from contract_tests.overlay.client_suite import generate
from contract_tests.overlay.server_suite import RESPONSE
from contract_tests.replies import FRAME, PACKED, write
from contract_tests.skyrl_server import Server, client_at, client_of
from skyrl_r3 import metrics, policy
from skyrl_r3.errors import MissingRoutesError, OverlayError, RoutesError

LAYERS, TOPK, EXPERTS = canned.LAYERS, 3, canned.EXPERTS
PROMPTS = [[10 * i + t for t in range(20)] for i in range(8)]
BAD = 5
"""Which of them it goes wrong with."""
ROWS = len(PROMPTS[0]) + len(RESPONSE) - 1
CONFIG = SimpleNamespace(
    model_type="qwen3_moe",
    num_hidden_layers=LAYERS,
    num_experts=EXPERTS,
    num_experts_per_tok=TOPK,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)


def routes_of(prompt: list[int]) -> np.ndarray:
    """The right routes of the reply to ``prompt``."""
    return canned.routes_of([*prompt, *RESPONSE][:-1], topk=TOPK)


def _set(where: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def plant(ids: np.ndarray) -> np.ndarray:
        ids = ids.copy()
        ids[where] = value
        return ids

    return plant


def _all_zero(ids: np.ndarray) -> np.ndarray:
    return np.zeros_like(ids)


PROMPT_ROWS = slice(0, len(PROMPTS[0]) - 1)
# Of rows: the kind, the fault, and the rows that it is in.
ROW_FAULTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], list[int]]] = {
    "a physical slot": ("out_of_range", _set((4, 2, 1), EXPERTS + 3), [4]),
    "nothing captured": ("all_equal", _all_zero, list(range(ROWS))),
    "a layer that nobody wrote": ("all_equal", _set((slice(None), 1), 0), list(range(ROWS))),
    "a layer that a draft wrote over with one expert": ("all_equal", _set((slice(None), 0), 3), list(range(ROWS))),
    "a prompt out of a cache": ("all_equal", _set((PROMPT_ROWS,), 0), list(range(len(PROMPTS[0]) - 1))),
    "an id twice": ("repeated", _set((7, 1), np.array([4, 5, 4])), [7]),
    "a stale row all along": ("identical_rows", _set((slice(2, 20),), np.array([3, 9, 1])), list(range(2, 20))),
}
WHOLE_FAULTS: dict[str, tuple[str, Any]] = {
    "no routes": ("missing", None),
    "a row too few": ("rows", lambda ids: ids[:-1]),
    "a row too many": ("rows", lambda ids: np.concatenate([ids, ids[-1:]])),
    "columns of shared experts": ("broken", lambda ids: np.concatenate([ids, ids[..., :1]], axis=2)),
    "a layer more": ("shape", lambda ids: np.concatenate([ids, ids[:, :1]], axis=1)),
}


class FindingsContract:
    """Derived from by each SkyRL line."""

    def ids(self, routes: Any) -> np.ndarray:
        """The ids of one sample, as this line's SkyRL has them."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv(policy.VARIABLE, raising=False)
        monkeypatch.setattr(policy, "_warned", set())
        monkeypatch.setattr(policy, "_shape", None)
        skyrl_r3.enable()
        metrics.report()
        yield
        policy.use(None)
        skyrl_r3.disable()

    async def traffic(self, plant: Callable[[np.ndarray], Any], bad: int = BAD) -> Any:
        """All prompts at once, with ``plant`` on the routes of one."""

        def complete(prompt: list[int], params: Any) -> Any:
            ids = routes_of(prompt)
            return canned.completion(
                RESPONSE, prompt=prompt, routed_experts=plant(ids) if prompt == PROMPTS[bad] else ids
            )

        engine = canned.CannedEngine(complete)
        engine.model_config = SimpleNamespace(hf_text_config=CONFIG)  # type: ignore[attr-defined]
        async with canned.served(canned.skyrl_app(engine)) as address, client_at(address) as client:
            output = await generate(client, PROMPTS)
        return output["rollout_expert_indices"]

    def assert_others_are_right(self, routes: list[Any], bad: int = BAD) -> None:
        for i, prompt in enumerate(PROMPTS):
            if i != bad:
                np.testing.assert_array_equal(self.ids(routes[i]), routes_of(prompt))

    async def test_nothing_is_found_in_right_routes(self) -> None:
        self.assert_others_are_right(await self.traffic(lambda ids: ids), bad=-1)
        assert [key for key in metrics.report() if key.startswith(("findings", "rows_masked"))] == []

    @pytest.mark.case("R01", "R03", "R04", "R05", "R10")
    @pytest.mark.parametrize("fault", ROW_FAULTS)
    async def test_error(self, fault: str) -> None:
        kind, plant, rows = ROW_FAULTS[fault]
        policy.use("error")
        with pytest.raises(RoutesError) as caught:
            await self.traffic(plant)
        error = caught.value
        assert (error.kind, error.field) == (kind, "routed_experts")
        assert error.where.startswith(f"row {rows[0]}, {len(rows)} of {ROWS} rows, of the prompt")
        assert "finish_reason 'stop'" in error.where
        assert error.where.endswith(f"session t{BAD}")
        assert metrics.report()[f"findings/{kind}"] == 1

    @pytest.mark.case("R07", "R71", "R98", "R102")
    @pytest.mark.parametrize("fault", ROW_FAULTS)
    async def test_mask(self, fault: str) -> None:
        kind, plant, rows = ROW_FAULTS[fault]
        policy.use("mask")
        routes = await self.traffic(plant)
        self.assert_others_are_right(routes)
        ids, whole = self.ids(routes[BAD]), plant(routes_of(PROMPTS[BAD]))
        assert np.flatnonzero(~ids.any(axis=(1, 2))).tolist() == rows
        others = [row for row in range(ROWS) if row not in rows]
        np.testing.assert_array_equal(ids[others], whole[others])
        counted = metrics.report()
        assert (counted[f"findings/{kind}"], counted["rows_masked"]) == (1, len(rows))

    @pytest.mark.case("R10", "R11", "R98")
    @pytest.mark.parametrize("fault", [fault for fault in ROW_FAULTS if fault != "a physical slot"])
    async def test_count(self, fault: str) -> None:
        kind, plant, _ = ROW_FAULTS[fault]
        policy.use("count")
        routes = await self.traffic(plant)
        self.assert_others_are_right(routes)
        np.testing.assert_array_equal(self.ids(routes[BAD]), plant(routes_of(PROMPTS[BAD])))
        counted = metrics.report()
        assert counted[f"findings/{kind}"] == 1
        assert "rows_masked" not in counted

    async def test_off(self) -> None:
        policy.use("off")
        for _, plant, _ in ROW_FAULTS.values():
            routes = await self.traffic(plant)
            np.testing.assert_array_equal(self.ids(routes[BAD]), plant(routes_of(PROMPTS[BAD])))
        assert [key for key in metrics.report() if key.startswith("findings")] == []

    def test_the_defaults(self) -> None:
        assert {kind for kind, action in policy.DEFAULTS.items() if action != "error"} == {"identical_rows", "changed"}

    @pytest.mark.case("R07", "R12")
    @pytest.mark.parametrize("fault", WHOLE_FAULTS)
    async def test_a_reply_of_which_no_row_can_be_trusted(self, fault: str) -> None:
        kind, plant = WHOLE_FAULTS[fault]
        with pytest.raises(RoutesError) as caught:
            await self.traffic(plant or (lambda ids: None))
        assert caught.value.kind == kind
        assert isinstance(caught.value, MissingRoutesError) == (kind == "missing")
        assert caught.value.where.endswith(f"session t{BAD}")
        assert metrics.report()[f"findings/{kind}"] == 1
        policy.use(f"{kind}=mask")
        routes = await self.traffic(plant or (lambda ids: None))
        self.assert_others_are_right(routes)
        ids = self.ids(routes[BAD])
        assert (ids.shape, ids.any()) == ((ROWS, LAYERS, TOPK), False)
        counted = metrics.report()
        assert (counted[f"findings/{kind}"], counted["rows_masked"]) == (1, ROWS)

    async def test_rows_that_are_made_up_are_not_counted_as_captured(self) -> None:
        def answer(number: int, request: dict[str, Any]) -> bytes:
            bad = request["token_ids"] == PROMPTS[BAD]
            return write(FRAME, RESPONSE, None if bad else routes_of(request["token_ids"]), layers=LAYERS, topk=TOPK)

        policy.use("mask")
        async with client_of(Server(answer)) as client:
            await generate(client, PROMPTS)
        counted = metrics.report()
        assert (counted["rows_captured"], counted["rows_masked"]) == (ROWS * (len(PROMPTS) - 1), ROWS)

    @pytest.mark.case("R60", "R71")
    @pytest.mark.parametrize("kind", ["broken", "prompt"])
    @pytest.mark.parametrize("encoding", [FRAME, PACKED])
    async def test_what_no_engine_sends(self, kind: str, encoding: str) -> None:
        """One broken body of eight, and one that a server answers for another prompt."""
        if (kind, encoding) == ("prompt", PACKED):
            encoding = FRAME  # Packed does not tell.

        def answer(number: int, request: dict[str, Any]) -> bytes:
            prompt = request["token_ids"]
            ids = routes_of(prompt)
            bad = prompt == PROMPTS[BAD]
            told = {"prompt_tokens": len(prompt) + (bad and kind == "prompt"), "topk": TOPK, "layers": LAYERS}
            body = write(encoding, RESPONSE, ids, **(told if encoding == FRAME else {}))
            if bad and kind == "broken":
                body = body.replace(b'"U8"', b'"U9"').replace(b'"uint8"', b'"uint9"')
            return body

        for action in ("error", "mask"):
            policy.use(f"{kind}={action}")
            async with client_of(Server(answer)) as client:
                if action == "error":
                    with pytest.raises(RoutesError) as caught:
                        await generate(client, PROMPTS)
                    assert (caught.value.kind, caught.value.where.endswith(f"session t{BAD}")) == (kind, True)
                else:
                    # So that it is known what routes look like, as packed replies do not say it.
                    await generate(client, PROMPTS[:1])
                    routes = (await generate(client, PROMPTS))["rollout_expert_indices"]
                    self.assert_others_are_right(routes)
                    assert (self.ids(routes[BAD]).shape, self.ids(routes[BAD]).any()) == ((ROWS, LAYERS, TOPK), False)
            assert metrics.report()[f"findings/{kind}"] == 1

    async def test_an_aborted_request_is_no_finding(self) -> None:
        def answer(number: int, request: dict[str, Any]) -> bytes:
            prompt = request["token_ids"]
            if prompt == PROMPTS[BAD]:
                return write(FRAME, [], np.zeros((2, LAYERS, TOPK), np.uint8), finish_reason="abort")
            return write(FRAME, RESPONSE, routes_of(prompt))

        async with client_of(Server(answer)) as client:
            output = await generate(client, PROMPTS)
        self.assert_others_are_right(output["rollout_expert_indices"])
        assert (output["response_ids"][BAD], output["stop_reasons"][BAD]) == ([], "abort")
        assert [key for key in metrics.report() if key.startswith("findings")] == []

    async def test_a_policy_that_cannot_be_read_is_an_error_before_anything_is_generated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy.use(None)
        monkeypatch.setenv(policy.VARIABLE, "sometimes")
        server = Server(lambda number, body: write(FRAME, RESPONSE, routes_of(PROMPTS[0])))
        async with client_of(server) as client:
            with pytest.raises(OverlayError) as caught:
                await generate(client)
        assert (caught.value.field, caught.value.got) == ("SKYRL_R3_CHECKS", "'sometimes'")
        assert server.requests == []
