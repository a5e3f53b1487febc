"""What is known of saved routes, as data: regions, what the checks find, what they can't see, and how experts are used.

The checks are those that a client makes of every reply; but where it stops at the first thing that is wrong, here all
of them are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_r3 import checks
from skyrl_r3.errors import RoutesError
from skyrl_r3.inspection.files import Saved
from skyrl_r3.policy import DEFAULTS, ERROR
from skyrl_r3.reply import FLOORED_LOGPROB
from skyrl_r3.spec import MAX_LAYERS, RouteSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """How the experts of one layer are used.

    Attributes:
        layer: Its index.
        rows: Those with a route in it. Where top-k is above 1, one that is all zero is none.
        experts: ids that were picked, ascending.
        picks: int ``[len(experts)]``, how often.
        note: Why it has no route, or one too many; empty in a layer as it should be.
    """

    layer: int
    rows: int
    experts: np.ndarray
    picks: np.ndarray
    note: str = ""

    @property
    def busiest(self) -> int:
        """The expert that is picked most."""
        return int(self.experts[self.picks.argmax()])

    @property
    def share(self) -> float:
        """Of the tokens, those that pick it."""
        return float(self.picks.max() / self.rows)

    def over_mean(self, num_experts: int) -> float:
        """Load of the busiest over that of the average one."""
        return float(self.picks.max() * num_experts / self.picks.sum())


@dataclass(kw_only=True, eq=False)
class Facts:
    """What is known of a file.

    Attributes:
        saved: What it holds.
        spec: What the model's routes look like, as far as it was told.
        prompt: Tokens of the prompt; None where nothing tells.
        start: The first token that has a row.
        told: Whether the prompt was told, and not worked out of rows and response.
        regions: Rows of prompt tokens and of response tokens; None where unknown.
        floored: Logprobs that there was no number for.
        findings: All that is wrong.
        unchecked: What can't be seen, and what would help.
        num_experts: For the load: of the model, or the largest id and one.
        loads: Of each layer.
    """

    saved: Saved
    spec: RouteSpec
    prompt: int | None = None
    start: int = 0
    told: bool = False
    regions: tuple[int, int] | None = None
    floored: int = 0
    findings: list[RoutesError] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    num_experts: int = 0
    loads: list[Load] = field(default_factory=list)

    @property
    def errors(self) -> list[RoutesError]:
        """The findings that end a run, unless a policy says otherwise."""
        return [finding for finding in self.findings if DEFAULTS[finding.kind] == ERROR]


def work_out(
    saved: Saved, *, prompt: int | None = None, start: int | None = None, num_experts: int | None = None
) -> Facts:
    """The facts of a file.

    Args:
        saved: It.
        prompt: Tokens of the prompt that was sent; None for what the file says.
        start: The ``routed_experts_prompt_start`` that was sent; None for what the file says.
        num_experts: Of the model; None for what the file says.
    """
    reply, ids = saved.reply, saved.ids
    spec = RouteSpec() if reply is None else reply.spec
    facts = Facts(saved=saved, spec=spec if num_experts is None else replace(spec, num_experts=num_experts))
    facts.start = start if start is not None else (reply and reply.start) or 0
    facts.prompt = prompt if prompt is not None else reply and reply.prompt_tokens
    facts.told = facts.prompt is not None
    if reply is not None and reply.logprobs is not None:
        facts.floored = int((reply.logprobs == FLOORED_LOGPROB).sum())
    _regions(facts)
    if saved.broken is not None:
        facts.findings.append(saved.broken)
    if ids is None:
        return facts
    if not facts.told:
        facts.unchecked.append("the number of rows: nothing tells the length of the prompt (--prompt-tokens N)")
    if reply is not None and not len(reply.token_ids):
        facts.unchecked.append("the ids: there is no response, so that nothing is trained with them")
    else:
        _check(ids, facts)
    if ids.size and ids.shape[1] <= MAX_LAYERS:
        facts.num_experts = facts.spec.num_experts or int(ids.max()) + 1
        facts.loads = _loads(ids, facts)
    return facts


def _regions(facts: Facts) -> None:
    """Which rows are whose. The last sampled token has none, so a response has one row less than tokens."""
    reply, ids = facts.saved.reply, facts.saved.ids
    rows = 0 if ids is None else len(ids)
    if reply is None:
        of_prompt = None if facts.prompt is None else facts.prompt - facts.start
        if ids is not None and of_prompt is not None and rows < of_prompt:
            counted = f"prompt {facts.prompt} - start {facts.start}"
            _add_rows_finding(facts, expected=f"at least {of_prompt} rows from {counted}", got=f"{rows} rows")
        elif ids is not None and of_prompt is not None:
            facts.regions = (of_prompt, rows - of_prompt)
        return
    tokens = len(reply.token_ids)
    of_response = max(tokens - 1, 0)
    if ids is not None and not facts.told and rows < of_response:
        _add_rows_finding(facts, expected=f"at least {of_response} rows for {tokens} tokens", got=f"{rows} rows")
        return
    if ids is not None and not facts.told and tokens:
        facts.prompt = rows - of_response + facts.start
    if facts.saved.broken is not None:
        return
    try:
        reply.routes_for(prompt=rows + facts.start if facts.prompt is None else facts.prompt, start=facts.start)
    except RoutesError as error:
        facts.findings.append(error)
        return
    if ids is not None:
        facts.regions = (rows - of_response, of_response)
        if facts.prompt is not None and tokens:
            facts.start = facts.prompt - facts.regions[0]  # 0, where an engine knows no start.


def _add_rows_finding(facts: Facts, *, expected: str, got: str) -> None:
    facts.findings.append(RoutesError("routed_experts.shape", kind="rows", expected=expected, got=got))


def _check(ids: np.ndarray, facts: Facts) -> None:
    """Add what is found in ids ``[rows, layers, topk]``, and what is not looked for."""
    spec = facts.spec
    if ids.shape[1] > MAX_LAYERS:
        expected, got = f"at most {MAX_LAYERS} layers", f"{ids.shape[1]} in {list(ids.shape)}"
        facts.findings.append(RoutesError("routed_experts.shape", kind="shape", expected=expected, got=got))
        return
    try:
        checks.check_shape(ids, spec)
    except RoutesError as error:
        facts.findings.append(error)
    boundary = None if facts.regions is None else facts.start + facts.regions[0]
    found = checks.find(ids, spec, first=facts.start, prompt=boundary)
    facts.findings += [finding.error for finding in found]
    if not spec.num_experts:
        facts.unchecked.append("that ids are of experts: nothing tells how many there are (--num-experts E)")
    if spec.layers is None:
        facts.unchecked.append("layers and top-k: nothing tells those of the model")
    if ids.shape[2] == 1:
        facts.unchecked.append("that the experts of a row differ: it has one")


def _loads(ids: np.ndarray, facts: Facts) -> list[Load]:
    told, topk = facts.spec.moe_layers, ids.shape[2]
    loads = []
    for layer in range(ids.shape[1]):
        picked = ids[:, layer]
        routed: Any = picked.any(axis=1)
        if topk == 1 and routed.any():
            routed[:] = True  # A single 0 is a route.
        experts, picks = np.unique(picked[routed], return_counts=True)
        known = experts < facts.num_experts  # Others are a finding, and no load.
        note = ""
        if not routed.any():
            note = "all zero: dense, or nothing captured" if told is None else "dense" if layer not in told else ""
            note = note or "all zero: nothing captured"
        elif told is not None and layer not in told:
            note = "routes, and is dense in the model"
        elif not routed.all():
            note = f"{len(routed) - int(routed.sum())} rows are all zero"
        elif not known.any():
            note = "no id is of an expert"
        loads.append(Load(layer=layer, rows=int(routed.sum()), experts=experts[known], picks=picks[known], note=note))
    return loads
