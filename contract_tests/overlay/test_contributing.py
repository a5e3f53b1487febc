"""What CONTRIBUTING.md names is there."""

from __future__ import annotations

import re

from contract_tests.child import REPO

TEXT = re.sub(r"\s+", " ", (REPO / "CONTRIBUTING.md").read_text("utf-8"))


def test_files_and_folders() -> None:
    """Those in backticks, by their path or by the end of it. X.Y and X_Y stand for a line."""
    names = {name for name in re.findall(r"`([\w./*-]+)`", TEXT) if "/" in name or re.search(r"\.(py|sh|md)$", name)}
    names |= {
        line for line in re.findall(r"[\w/.-]+\.(?:py|toml|sh)\b", TEXT) if line.split("/")[0] in ("ci", "patches")
    }
    names -= {"skyrl/"}  # SkyRL's own.
    assert {"ci/env.sh", "client_04.py", "patches/skyrl-0.3.toml"} <= names
    patterns = {name: re.sub("X[._]Y", "*", name).rstrip("/") for name in names}
    assert [name for name, pattern in patterns.items() if not list(REPO.rglob(pattern))] == []


def test_names_in_files() -> None:
    """As in "`SIDES` of `skyrl_r3/bench/plan.py`"."""
    told = re.findall(r"`(\w+)`(?: and `(\w+)`)?(?:, both)? (?:of|in) `([\w./]+\.(?:py|toml|sh))`", TEXT)
    assert len(told) >= 11
    for *names, place in told:
        files = [REPO / place] if (REPO / place).is_file() else list(REPO.rglob(place))
        texts = [path.read_text("utf-8") for path in files]
        missing = [name for name in names if name and not any(re.search(rf"\b{name}\b", text) for text in texts)]
        assert missing == [], place
