"""The report in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_tests.facts import Facts, Replay
from gpu_tests.pictures import significant


def verdict(facts: Facts) -> str:
    """One sentence: what was compared, whether all is equal, what replay does to the gap, and whether parts lack."""
    said = []
    if found := facts.parities:
        replies, rows = sum(one.replies for one in found), sum(one.rows for one in found)
        scenarios, models = {one.scenario for one in found}, {one.model for one in found}
        where = f"in {count(len(scenarios), 'scenario')} with {count(len(models), 'model')}"
        size = f"{count(replies, 'reply', 'replies')}, {count(rows, 'row')} of routes"
        said.append(f"stock SkyRL and the overlay gave the same, bit for bit, {where} ({size})")
    if facts.replays:
        said.append(_lowered(facts.replays))
    if not said:
        said.append("nothing was compared in this run")
    if facts.not_run:
        said.append(f"{count(len(facts.not_run), 'part')} of the run did not run or failed, as listed below")
    text = "; ".join(said)
    return text[0].upper() + text[1:] + "."


def _lowered(replays: Sequence[Replay]) -> str:
    """What replay does to the mean absolute gap, over all comparisons."""
    what = "the mean absolute logprob gap between trainer and engine"
    if others := [one for one in replays if not one.replayed.mean_abs < one.without.mean_abs]:
        names = ", ".join(f"{one.model} ({one.engine})" for one in others)
        return f"replaying the captured routes does not lower {what} for {names}, of {len(replays)} compared"
    factors = [one.without.mean_abs / one.replayed.mean_abs for one in replays if one.replayed.mean_abs]
    by = " to ".join(dict.fromkeys(significant(factor) for factor in (min(factors), max(factors)))) if factors else ""
    where = f"in all {len(replays)} comparisons" if len(replays) > 1 else f"for {replays[0].model}"
    zero = len(replays) - len(factors)
    said = [f"by a factor of {by}"] * bool(factors) + ["to zero" + f" in {zero}" * bool(factors)] * bool(zero)
    return f"replaying the captured routes lowers {what} {where}, {' and '.join(said)}"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number and what there is of it."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
