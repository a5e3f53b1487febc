"""Every order of import, enable, disable and the import hook's start, against a model of what must come of it.

A line's tests derive from :class:`OrderContract` and say which line that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from contract_tests.overlay.life_suite import LifeContract

VERBS = ("start", "import some", "import others", "enable", "disable")
# By SKYRL_R3: steps of the longest orders. With "off" there is nothing to remember from one step to the next.
LONGEST = {"on": 4, "off": 3}
Order = tuple[str, ...]
Lived = dict[Order, dict[str, Any]]


@dataclass
class Model:
    """What a process is like: which modules are imported, whether the hook is there, what is replaced."""

    needs: dict[str, set[str]]
    off: bool
    hook: bool = False
    imported: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def do(self, verb: str, halves: tuple[Sequence[str], Sequence[str]]) -> None:
        if verb == "disable":
            self.hook, self.replaced = False, set()
        elif verb in ("start", "enable"):
            self.hook = not self.off
            if verb == "enable" and not self.off:
                self.replaced = set(self.imported)
        else:
            for module in halves[verb == "import others"]:
                new = self.needs[module] - self.imported
                self.imported |= new
                self.replaced |= new if self.hook else set()


def orders(switch: str) -> list[Order]:
    return [order for length in range(LONGEST[switch] + 1) for order in product(VERBS, repeat=length)]


class OrderContract(LifeContract):
    """Tests that hold in every line."""

    @pytest.fixture(scope="class", params=list(LONGEST))
    def switch(self, request: pytest.FixtureRequest) -> str:
        """``SKYRL_R3``."""
        return request.param

    @pytest.fixture(scope="class")
    def lived(self, switch: str, tmp_path_factory: pytest.TempPathFactory) -> Lived:
        """By order, what there was at its end. What there was before is the end of a shorter order."""
        folder = tmp_path_factory.mktemp("orders")
        double = self.build(folder / "double")
        some, others = self.halves
        steps = {verb: [verb] for verb in VERBS} | {"import some": ["import", *some]}
        steps |= {"import others": ["import", *others]}
        lives = [(double, [steps[verb] for verb in order]) for order in orders(switch)]
        return dict(zip(orders(switch), self.live(folder, lives, {"SKYRL_R3": switch}), strict=True))

    def expected(self, order: Order, switch: str) -> Model:
        model, halves = Model({module: self.needs(module) for module in self.modules}, off=switch == "off"), self.halves
        for verb in order:
            model.do(verb, halves)
        return model

    def test_no_order_is_forgotten(self, lived: Lived, switch: str) -> None:
        count = sum(len(VERBS) ** length for length in range(LONGEST[switch] + 1))
        assert len(lived) == count == {"on": 781, "off": 156}[switch]
        assert all(order[:-1] in lived for order in lived if order)
        # Twice the same, and back again: the orders that people run.
        assert {("enable", "enable"), ("import some", "enable", "disable")} <= lived.keys()

    def test_the_halves_are_all_modules(self) -> None:
        some, others = self.halves
        assert sorted([*some, *others]) == sorted(self.modules)
        assert some
        assert others

    def test_the_status_of_every_target(self, lived: Lived, switch: str) -> None:
        for order, life in lived.items():
            replaced = self.expected(order, switch).replaced
            rows = {row.name: "applied" if row.module in replaced else "pending" for row in self.manifest.targets}
            assert life["looks"][-1]["states"] == rows, order

    def test_every_function_is_replaced_once_or_is_skyrl_s_own(self, lived: Lived, switch: str) -> None:
        """SkyRL's own by identity: a static method is the very object that it was."""
        for order, life in lived.items():
            model = self.expected(order, switch)
            rows = [row for row in self.manifest.targets if row.module in model.imported]
            functions = {row.name: ["ours"] * (row.module in model.replaced) + ["stock"] for row in rows}
            assert life["looks"][-1]["functions"] == functions, order

    def test_a_function_under_two_names_stays_one(self, lived: Lived, switch: str) -> None:
        """Imported before or after it was replaced. But for a start of the hook between the two imports."""
        names = {row.name: self.names_of(row) for row in self.manifest.targets}
        for order, life in lived.items():
            model = self.expected(order, switch)
            rows = [row for row in self.manifest.targets if row.module in model.imported]
            on = {row.name: row.module in model.replaced for row in rows}
            same = [[b.name in names[a.name] and on[a.name] == on[b.name] for b in rows] for a in rows]
            assert life["looks"][-1]["same"] == same, order

    def test_there_is_one_finder_or_none(self, lived: Lived, switch: str) -> None:
        for order, life in lived.items():
            assert life["looks"][-1]["finders"] == self.expected(order, switch).hook, order

    def test_enable_and_disable_return_what_status_says(self, lived: Lived, switch: str) -> None:
        ends = [order for order in lived if order[-1:] in (("enable",), ("disable",))]
        assert len(ends) == 2 * sum(len(VERBS) ** length for length in range(LONGEST[switch]))
        for order in ends:
            assert lived[order]["events"][-1] == lived[order]["looks"][-1]["states"], order

    def test_no_step_fails_and_none_warns(self, lived: Lived, switch: str) -> None:
        """But where it is switched off: ``enable()`` says that it does nothing."""
        for order, life in lived.items():
            failed = [event for event in life["events"] if isinstance(event, dict) and "error" in event]
            assert failed == [], order
            imports = [event for event in life["events"] if isinstance(event, list)]
            assert imports == [[]] * len(imports), order
            assert len(life["heard"]) == (order.count("enable") if switch == "off" else 0), order
