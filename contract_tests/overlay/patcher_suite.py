"""Somebody else patches the same function, before us or after: for every target.

A line's tests derive from :class:`PatcherContract` and say which line that is.
"""

from __future__ import annotations

from typing import Any

import pytest

from contract_tests.overlay.life_suite import LifeContract, Step
from skyrl_r3.manifest import Target

FORMS: dict[str, list[str]] = {
    "wraps ours": ["wrap", "look", "disable", "look", "enable", "look", "put_back", "look", "disable"],
    "replaces ours": ["replace", "look", "disable", "look", "enable", "look", "put_back", "look", "disable"],
    "restores SkyRL's": [
        "put_stock",
        "look",
        "enable",
        "look",
        "put_stock",
        "disable",
        "look",
        "enable",
        "look",
        "disable",
    ],
    "wraps ours twice": ["wrap", "wrap", "look", "disable", "look", "enable"],
    "removes theirs while off": ["wrap", "disable", "put_back", "look", "enable", "look", "disable"],
    "puts SkyRL's back while off": ["wrap", "disable", "put_stock", "look", "enable", "look", "disable"],
}
FIRST: dict[str, list[str]] = {
    "wrapped before us": ["enable", "look", "disable", "look", "put_back"],
    "restores an older one": ["enable", "put_back", "look", "disable", "look", "enable", "look", "disable"],
}
STOCK, OURS, THEIRS = ["stock"], ["ours", "stock"], ["theirs", "ours", "stock"]
OFF, ON, LOST = ("pending", STOCK), ("applied", OURS), ("superseded", STOCK)
# By form: state of the target and what is there, at each look and at the end. All the others are on or off.
SEEN: dict[str, list[tuple[bool, str, list[str]]]] = {
    "wraps ours": [
        (True, "superseded", THEIRS),
        (False, "superseded", THEIRS),
        (True, "superseded", THEIRS),
        (True, *ON),
        (False, *OFF),
    ],
    "replaces ours": [
        (True, "superseded", ["theirs"]),
        (False, "superseded", ["theirs"]),
        (True, "superseded", ["theirs"]),
        (True, *ON),
        (False, *OFF),
    ],
    "restores SkyRL's": [(True, *LOST), (True, *ON), (False, *OFF), (True, *ON), (False, *OFF)],
    "wraps ours twice": [
        (True, "superseded", ["theirs", *THEIRS]),
        (False, "superseded", ["theirs", *THEIRS]),
        (True, "superseded", ["theirs", *THEIRS]),
    ],
    "removes theirs while off": [(False, "applied", OURS), (True, *ON), (False, *OFF)],
    "puts SkyRL's back while off": [(False, "superseded", STOCK), (True, *ON), (False, *OFF)],
    "wrapped before us": [
        (True, "applied", ["ours", "theirs", "stock"]),
        (False, "pending", ["theirs", "stock"]),
        (False, *OFF),
    ],
    "restores an older one": [(True, *LOST), (False, *OFF), (True, *ON), (False, *OFF)],
}
# The same where ours does not go around theirs: `enable()` raises and applies nothing as long as theirs is there.
LEFT_ALONE: dict[str, list[tuple[bool, str, list[str]]]] = {
    "wrapped before us": [
        (False, "pending", ["theirs", "stock"]),
        (False, "pending", ["theirs", "stock"]),
        (False, *OFF),
    ],
    "restores an older one": [(False, *OFF), (False, *OFF), (True, *ON), (False, *OFF)],
}
CASES = [(start, form) for form in FORMS for start in ("enable", "hook")] + [("enable", form) for form in FIRST]


class PatcherContract(LifeContract):
    """Tests that hold in every line.

    Attributes:
        alone: Targets that are replaced and not wrapped, so that they go around nothing but SkyRL's own.
    """

    alone: tuple[str, ...] = ()

    def steps(self, start: str, form: str, target: Target) -> list[Step]:
        place = [target.module, target.attribute]
        imports = ["import", *self.modules]
        begin: list[Step] = [["start"], imports] if start == "hook" else [imports, ["enable"]]
        if form in FIRST:
            begin = [imports, ["wrap", *place]]
        verbs = (FORMS | FIRST)[form]
        return [*begin, *([verb] if verb in ("look", "enable", "disable") else [verb, *place] for verb in verbs)]

    @pytest.fixture(scope="class")
    def lived(self, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
        """By start, form and target."""
        folder = tmp_path_factory.mktemp("patchers")
        double = self.build(folder / "double")
        lives = {
            (start, form, target.name): (double, self.steps(start, form, target))
            for start, form in CASES
            for target in self.manifest.targets
        }
        return dict(zip(lives, self.live(folder, list(lives.values())), strict=True))

    @pytest.mark.parametrize(("start", "form"), CASES)
    def test_another_patcher(
        self, lived: dict[tuple[str, str, str], dict[str, Any]], start: str, form: str, target: Target
    ) -> None:
        """Theirs is never thrown away, ours is never there twice, and no other target is touched by the quarrel."""
        life, alone = lived[start, form, target.name], form in FIRST and target.name in self.alone
        expected = LEFT_ALONE[form] if alone else SEEN[form]
        raised = [event for event in life["events"] if isinstance(event, dict) and "error" in event]
        assert raised == ([{"error": "OverlayError", "field": target.attribute}] if alone else [])
        seen = [(look["states"][target.name], look["functions"][target.name]) for look in life["looks"]]
        assert seen == [(state, layers) for _, state, layers in expected]
        for look, (on, _, _) in zip(life["looks"], expected, strict=True):
            others = set(self.targets) - {target.name}
            found = {(look["states"][name], *look["functions"][name]) for name in others}
            assert found == ({("applied", *OURS)} if on else {("pending", *STOCK)})

    @pytest.mark.parametrize("form", ["wraps ours", "replaces ours"])
    def test_disable_names_whose_it_is(
        self, lived: dict[tuple[str, str, str], dict[str, Any]], form: str, target: Target
    ) -> None:
        """In a warning and in the status. A wrapper made with functools.wraps bears the name of what it wraps."""
        life = lived["enable", form, target.name]
        (warning,) = life["heard"]
        name = target.attribute if form == "wraps ours" else "replacement"
        assert warning.startswith(f"{target.name} stays as it is")
        assert name in warning.removeprefix(target.name)
        for look in life["looks"][:3]:
            assert name in look["details"][target.name]
