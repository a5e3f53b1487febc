"""A SkyRL that does not fit, and a patch that fails half-way: for every target, whenever its module is imported.

A line's tests derive from :class:`FaultContract` and say which line that is.
"""

from __future__ import annotations

from typing import Any

import pytest

from contract_tests.overlay.life_suite import LifeContract, Step
from contract_tests.overlay.overlay_suite import more_parameters
from skyrl_r3.manifest import Target

# When the overlay is switched on: before some, all or none of the modules are imported, or by the import hook alone.
MOMENTS = ("after the imports", "before the imports", "between the imports", "hook")
DRIFTS = ("signature", "attribute", "module")
FAILURES = ("factory", "attribute")
Seen = dict[tuple[str, str, str], dict[str, Any]]


class FaultContract(LifeContract):
    """Tests that hold in every line."""

    def steps(self, moment: str) -> list[Step]:
        """Imports and ``enable``; with a look when all is imported. With the hook, ``enable`` comes last."""
        some, others = self.halves
        everything = ["import", *self.modules]
        moments: dict[str, list[Step]] = {
            "after the imports": [everything, ["enable"], ["look"]],
            "before the imports": [["enable"], everything, ["look"]],
            "between the imports": [["import", *some], ["enable"], ["import", *others], ["look"]],
            "hook": [["start"], everything, ["look"], ["enable"]],
        }
        return moments[moment]

    def imported(self, moment: str) -> set[str]:
        """The modules that are there when ``enable`` is called, or the hook is started."""
        modules = {"after the imports": self.modules, "between the imports": self.halves[0]}.get(moment, [])
        return {needed for module in modules for needed in self.needs(module)}

    def guards(self) -> list[str]:
        return [target.name for target in self.manifest.targets if target.refusal]

    # A SkyRL that does not fit

    @pytest.fixture(scope="class")
    def drifted(self, tmp_path_factory: pytest.TempPathFactory) -> Seen:
        """By kind of drift, target and moment."""
        folder = tmp_path_factory.mktemp("drift")
        lives = {}
        for number, target in enumerate(self.manifest.targets):
            # A name that is imported has the signature that its home gives it.
            changed = f"{self.home(target)}.{target.attribute}"
            for kind in DRIFTS:
                change: dict[str, Any] = {
                    "signature": {"signatures": {changed: more_parameters(target.signature)}},
                    "attribute": {"omit": [target.name]},
                    "module": {"omit": [target.module]},
                }[kind]
                double = self.build(folder / f"{number}-{kind}", **change)
                for moment in MOMENTS:
                    lives[kind, target.name, moment] = (double, [*self.steps(moment), ["disable"]])
        return dict(zip(lives, self.live(folder, list(lives.values())), strict=True))

    def unfit(self, kind: str, target: Target) -> list[str]:
        """The targets that do not fit, in the manifest's order."""
        if kind == "signature":
            return self.names_of(target)
        gone = [
            row for row in self.manifest.targets if row == target or (kind == "module" and row.module == target.module)
        ]
        named = {f"{row.module}.{row.attribute}" for row in gone}
        return [
            row.name
            for row in self.manifest.targets
            if row.name in named or f"{self.home(row)}.{row.attribute}" in named
        ]

    @pytest.mark.parametrize("moment", MOMENTS)
    @pytest.mark.parametrize("kind", DRIFTS)
    def test_drift_is_refused_by_name_and_nothing_is_replaced(
        self, drifted: Seen, kind: str, target: Target, moment: str
    ) -> None:
        life, unfit = drifted[kind, target.name, moment], self.unfit(kind, target)
        (refused,) = [event for event in life["events"] if isinstance(event, dict) and "error" in event]
        others = f" and {len(unfit) - 1} more" if len(unfit) > 1 else ""
        assert refused == {"error": "DriftError", "field": unfit[0] + others}
        look, end = life["looks"]
        state = "drifted" if kind == "signature" else "absent"
        assert look["states"] == {name: state if name in unfit else "pending" for name in self.targets}
        assert look["finders"] == (moment == "hook")
        for name, layers in look["functions"].items():
            guarded = moment == "hook" and name in self.guards()
            assert layers == (["guard", "stock"] if guarded else ["stock"]), name
        assert set(end["functions"]) == set(look["functions"])
        assert all(layers == ["stock"] for layers in end["functions"].values())

    @pytest.mark.parametrize("moment", MOMENTS)
    @pytest.mark.parametrize("kind", DRIFTS)
    def test_what_is_left_of_skyrl_is_imported_as_ever(
        self, drifted: Seen, kind: str, target: Target, moment: str
    ) -> None:
        """A module fails only if it is gone, or imports what is gone: as it would without the overlay."""
        gone = self.unfit(kind, target) if kind != "signature" else []
        broken = {
            row.module
            for row in self.manifest.targets
            if (kind == "module" and row.module == target.module) or (row.name in gone and self.home(row) != row.module)
        } - ({target.module} if kind == "attribute" else set())
        failed = [
            module
            for event in drifted[kind, target.name, moment]["events"]
            if isinstance(event, list)
            for module in event
        ]
        assert sorted(failed) == sorted(broken)

    # A patch that fails

    @pytest.fixture(scope="class")
    def failed(self, tmp_path_factory: pytest.TempPathFactory) -> Seen:
        """By kind of failure, target and moment."""
        folder = tmp_path_factory.mktemp("failure")
        double = self.build(folder / "double")
        after: list[Step] = [["mend"], ["enable"], ["look"], ["disable"]]
        lives = {
            (kind, target.name, moment): (
                double,
                [[f"break_{kind}", target.module, target.attribute], *self.steps(moment), *after],
            )
            for kind in FAILURES
            for target in self.manifest.targets
            for moment in MOMENTS
        }
        return dict(zip(lives, self.live(folder, list(lives.values())), strict=True))

    def stuck(self, kind: str, target: Target, moment: str) -> list[str]:
        """A name that imports a replacement, and then does not let itself be set: nothing can put SkyRL's back."""
        imported = kind == "attribute" and self.home(target) != target.module
        return [target.name] if imported and not self.fails_in_enable(kind, target, moment) else []

    def fails_in_enable(self, kind: str, target: Target, moment: str) -> bool:
        """Whether it is ``enable`` that meets the failure, and not an import after it.

        One function under two names is made once, so that a factory fails at the first of them.
        """
        names = self.names_of(target) if kind == "factory" else [target.name]
        modules = {row.module for row in self.manifest.targets if row.name in names}
        return bool(modules & self.imported(moment))

    @pytest.mark.parametrize("moment", MOMENTS)
    @pytest.mark.parametrize("kind", FAILURES)
    def test_a_half_applied_overlay_is_rolled_back(self, failed: Seen, kind: str, target: Target, moment: str) -> None:
        """Whatever was replaced before it, and in whichever module, is as SkyRL made it."""
        life, in_enable = failed[kind, target.name, moment], self.fails_in_enable(kind, target, moment)
        look, stuck = life["looks"][0], self.stuck(kind, target, moment)
        functions = {name: layers for name, layers in look["functions"].items() if name not in stuck}
        own = [name for name in self.targets if name not in stuck]
        if in_enable:
            assert look["states"] == dict.fromkeys(self.targets, "pending")
            assert functions == {name: ["stock"] for name in self.targets}
            assert look["finders"] == 0
        else:
            # With the flag on both ends refuse, but for the one that does not let itself be set.
            guards = set(self.guards()) - ({target.name} if kind == "attribute" else set())
            assert look["states"] == dict.fromkeys(self.targets, "drifted")
            assert functions == {name: ["guard"] * (name in guards) + ["stock"] for name in own}
            assert look["finders"] == 1

    @pytest.mark.parametrize("moment", MOMENTS)
    @pytest.mark.parametrize("kind", FAILURES)
    def test_a_failed_patch_is_said_and_breaks_no_import(
        self, failed: Seen, kind: str, target: Target, moment: str
    ) -> None:
        life, in_enable = failed[kind, target.name, moment], self.fails_in_enable(kind, target, moment)
        imports = [event for event in life["events"] if isinstance(event, list)]
        assert imports == [[]] * (2 if moment == "between the imports" else 1)
        raised = [event for event in life["events"] if isinstance(event, dict) and "error" in event]
        if in_enable:
            error = "RuntimeError" if kind == "factory" else "AttributeError"
            said = "broken on purpose" if kind == "factory" else f"{target.name} is fixed"
            assert raised == [{"error": error, "field": said}]
        else:
            # From then on this process has no overlay, and whoever asks for it is told.
            assert raised == [{"error": "OverlayError", "field": "skyrl_r3"}] * (2 if moment == "hook" else 1)
            assert life["heard"][0] == "skyrl-r3 could not patch SkyRL and leaves it as it is. Please report this."

    @pytest.mark.parametrize("moment", MOMENTS)
    @pytest.mark.parametrize("kind", FAILURES)
    def test_after_a_failed_enable_another_one_works_and_disable_puts_all_back(
        self, failed: Seen, kind: str, target: Target, moment: str
    ) -> None:
        _, again, end = failed[kind, target.name, moment]["looks"]
        if self.fails_in_enable(kind, target, moment):
            assert again["states"] == dict.fromkeys(self.targets, "applied")
            assert again["functions"] == {name: ["ours", "stock"] for name in self.targets}
        stuck = self.stuck(kind, target, moment)
        assert [name for name, layers in end["functions"].items() if layers != ["stock"]] == stuck
        assert end["finders"] == 0

    def test_failures_come_at_both_times(self) -> None:
        """In ``enable`` and in an import after it, for each target: else the tests above see one side only."""
        for kind in FAILURES:
            for target in self.manifest.targets:
                assert {self.fails_in_enable(kind, target, moment) for moment in MOMENTS} == {True, False}
