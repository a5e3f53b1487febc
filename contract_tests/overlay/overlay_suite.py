"""On, off and drift, each in a process of its own, with a double of each SkyRL line.

A line's tests derive from :class:`OverlayContract` and say which line that is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import run, run_python
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import MAIN_BLOCK, SERVER
from contract_tests.overlay.line import LineContract
from skyrl_r3.manifest import Target

ENDPOINTS = f"{SERVER}.VLLMServerActor._add_custom_endpoints"

RAW = """
import inspect, sys, skyrl_r3
def raw(module, attribute):
    owner, *rest = sys.modules[module], *attribute.split(".")
    for name in rest[:-1]:
        owner = getattr(owner, name)
    return inspect.getattr_static(owner, rest[-1])
"""

ENDS = f"""
import asyncio, skyrl_r3
from types import SimpleNamespace
def outcome(call):
    try:
        result = call()
        return ["returned", asyncio.run(result) if asyncio.iscoroutine(result) else result]
    except Exception as error:
        return [type(error).__name__, getattr(error, "field", None), getattr(error, "where", None)]
def server_end(flag):
    args = SimpleNamespace(enable_return_routed_experts=flag)
    return outcome(lambda: {SERVER}.VLLMServerActor._add_custom_endpoints(None, None, args))
"""

PROBE = """
import json, sys, traceback
def main():
    try:
        raise ValueError("here")  # LINE
    except ValueError:
        frames = traceback.format_exc()
    function = VLLMServerActor.__dict__["_add_custom_endpoints"].__func__
    facts = {
        "patched": hasattr(function, "__wrapped__"),
        "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
        "spec": [__spec__.name, __spec__.origin, __spec__.cached], "frames": frames,
        "first": VLLMServerActor._add_custom_endpoints.__code__.co_firstlineno if not hasattr(function, "__wrapped__")
                 else function.__wrapped__.__code__.co_firstlineno,
        "annotations": main.__annotations__, "future": annotations.compiler_flag, "argv": sys.argv[1:],
        "names": sorted(name for name in globals() if not name.startswith("__")), "cached": __cached__,
    }
    print("REPORT " + json.dumps(facts))
main.__annotations__["kept"] = "unresolved"
"""


def more_parameters(signature: str) -> str:
    """``signature`` with a parameter more, which callers need not give."""
    return f"{signature[: signature.rindex(')')]}, extra=None)"


class OverlayContract(LineContract):
    """Tests that hold in every line.

    Attributes:
        client_end: Code of a function ``client_end(flag)``: what SkyRL's client makes of a request with or without
            routes.
        client_target: The target that the client's call ends in where nothing is applied.
    """

    client_end: str
    client_target: str

    @pytest.fixture(scope="class")
    def double(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder with the double of this line's SkyRL, as it should be."""
        return fake_skyrl.build(tmp_path_factory.mktemp("double"), like=self.release)

    @property
    def import_all(self) -> str:
        return "import " + ", ".join(dict.fromkeys(target.module for target in self.manifest.targets)) + "\n"

    @property
    def places(self) -> list[tuple[str, str]]:
        return [(target.module, target.attribute) for target in self.manifest.targets]

    # Order

    def test_enable_after_the_imports(self, double: Path) -> None:
        ran = run(
            self.import_all
            + RAW
            + f"""
before = states()
stock = [raw(*place) for place in {self.places!r}]
rows = skyrl_r3.enable()
now = [raw(*place) for place in {self.places!r}]
kept = [getattr(a, "__func__", a).__wrapped__ is getattr(b, "__func__", b) for a, b in zip(now, stock)]
report(before=before, after=states(), returned={{row.target: row.state for row in rows}}, kept=kept)
""",
            path=[double],
        )
        assert self.among(ran.values["before"], "pending") == self.targets
        assert self.among(ran.values["after"], "applied") == self.targets
        assert ran.values["returned"] == ran.values["after"]
        assert ran.values["kept"] == [True] * len(self.targets)

    def test_enable_before_the_imports(self, double: Path) -> None:
        ran = run(
            f"""
            import skyrl_r3
            skyrl_r3.enable()
            before = states()
            {self.import_all}
            report(before=before, after=states())
            """,
            path=[double],
        )
        assert self.among(ran.values["before"], "pending") == self.targets
        assert self.among(ran.values["after"], "applied") == self.targets

    def test_import_hook_alone(self, double: Path) -> None:
        ran = run(f"{self.import_all}\nreport(states=states())", path=[double], hook=True)
        assert self.among(ran.values["states"], "applied") == self.targets
        assert ran.stderr == ""

    def test_nothing_is_patched_without_hook_and_without_enable(self, double: Path) -> None:
        ran = run(
            self.import_all + RAW + f"report(on=[patched(raw(*p)) for p in {self.places!r}], states=states())",
            path=[double],
        )
        assert ran.values["on"] == [False] * len(self.targets)
        assert self.among(ran.values["states"], "pending") == self.targets

    def test_disable_puts_every_original_back_and_enable_works_again(self, double: Path) -> None:
        """Static descriptors included: a staticmethod comes back as the very object that it was."""
        ran = run(
            self.import_all
            + RAW
            + f"""
stock = [raw(*place) for place in {self.places!r}]
rounds = []
for _ in range(3):
    skyrl_r3.enable()
    on = [raw(*place) for place in {self.places!r}]
    applied = list(states().values())
    skyrl_r3.disable()
    rounds.append([
        all(a is not b for a, b in zip(on, stock)), set(applied) == {{"applied"}},
        all(raw(*place) is b for place, b in zip({self.places!r}, stock)), set(states().values()) == {{"pending"}},
    ])
report(rounds=rounds)
""",
            path=[double],
        )
        assert ran.values["rounds"] == [[True] * 4] * 3

    def test_status_says_where_and_what(self, double: Path) -> None:
        """A row names version and process; a source that is not the reviewed one is patched and said to differ."""
        ran = run(
            f"""
            import {SERVER}
            import dataclasses, os, skyrl_r3
            skyrl_r3.enable()
            report(pid=os.getpid(), rows=[dataclasses.asdict(row) for row in skyrl_r3.status()])
            """,
            path=[double],
        )
        rows = {row["target"]: row for row in ran.values["rows"]}
        assert list(rows) == self.targets
        assert {row["version"] for row in rows.values()} == {self.release}
        assert {row["pid"] for row in rows.values()} == {ran.values["pid"]}
        assert "differs" in rows[ENDPOINTS]["detail"]
        assert rows[ENDPOINTS]["state"] == "applied"
        assert rows[self.client_target]["state"] == "pending"

    # Drift

    def test_with_one_target_drifted_nothing_is_applied_and_both_ends_refuse_routes(
        self, tmp_path: Path, target: Target
    ) -> None:
        """Whichever it is. Flag off: SkyRL answers for itself, and nobody says a word."""
        drifted = self.names_of(target)
        signatures = dict.fromkeys(drifted, more_parameters(target.signature))
        folder = fake_skyrl.build(tmp_path, like=self.release, signatures=signatures)
        ran = run(
            self.import_all
            + RAW
            + ENDS
            + self.client_end
            + f"""
off, on = [client_end(False), server_end(False)], [client_end(True), server_end(True)]
enabled = outcome(skyrl_r3.enable)
still = states()
skyrl_r3.disable()
report(off=off, on=on, enabled=enabled, states=still, patched=[patched(raw(*place)) for place in {self.places!r}])
""",
            path=[folder],
            hook=True,
        )
        values = ran.values
        assert values["off"] == [["returned", {"stock": self.client_target}], ["returned", {"stock": ENDPOINTS}]]
        for refused in (*values["on"], values["enabled"]):
            assert refused[0] == "DriftError"
            assert refused[1].startswith(drifted[0])
            assert self.release in refused[2]
        assert self.among(values["states"], "drifted") == drifted
        assert self.among(values["states"], "applied") == []
        assert values["patched"] == [False] * len(self.targets)
        assert ran.stderr == ""

    def test_with_one_target_gone_enable_raises_and_applies_nothing(self, tmp_path: Path, target: Target) -> None:
        gone = self.names_of(target)
        others = [place for place in self.places if ".".join(place) not in gone]
        folder = fake_skyrl.build(tmp_path, like=self.release, omit=gone)
        ran = run(
            self.import_all
            + RAW
            + ENDS
            + "report(enabled=outcome(skyrl_r3.enable), states=states(),"
            + f" patched=[patched(raw(*place)) for place in {others!r}])",
            path=[folder],
        )
        assert ran.values["enabled"][0] == "DriftError"
        assert ran.values["enabled"][1].startswith(gone[0])
        assert self.among(ran.values["states"], "absent") == gone
        assert self.among(ran.values["states"], "applied") == []
        assert ran.values["patched"] == [False] * len(others)

    @pytest.mark.parametrize("hook", [False, True], ids=["enable", "hook"])
    def test_a_factory_that_raises_is_rolled_back(self, double: Path, hook: bool) -> None:
        """Of all targets, whatever was replaced before it is as SkyRL made it; the import itself succeeds."""
        module, _, name = self.manifest.targets[-1].replacement.partition(":")
        ran = run(
            f"""
            import {module} as hooks
            def broken(original):
                raise RuntimeError("broken on purpose")
            hooks.{name} = broken
            {self.import_all}
            {RAW.replace(chr(10), chr(10) + " " * 12)}
            error = None
            try:
                if not {hook}:
                    skyrl_r3.enable()
            except RuntimeError as raised:
                error = str(raised)
            failed = states()
            skyrl_r3.disable()
            report(error=error, states=failed, patched=[patched(raw(*place)) for place in {self.places!r}])
            """,
            path=[double],
            hook=hook,
        )
        assert ran.values["error"] == (None if hook else "broken on purpose")
        assert ran.values["patched"] == [False] * len(self.targets)
        assert self.among(ran.values["states"], "applied") == []
        assert ("broken on purpose" in ran.stderr) is hook

    # python -m

    def test_python_m_is_patched_before_its_main_block(self, tmp_path: Path, wheel_python: Path) -> None:
        """SkyRL's server is started so. Everything but the patch is as with ``SKYRL_R3=off``, line numbers too."""
        folder = fake_skyrl.build(tmp_path, like=self.release, bottom={SERVER: PROBE + MAIN_BLOCK})
        command = [str(wheel_python), "-m", SERVER, "--port", "1"]
        on = run_python(command, path=[folder])
        off = run_python(command, path=[folder], env={"SKYRL_R3": "off"})
        values: dict[str, Any] = on.values
        assert values.pop("patched") is True
        assert off.values.pop("patched") is False
        assert values == off.values
        file = folder.joinpath("skyrl", *SERVER.split(".")[1:]).with_suffix(".py")
        line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if "# LINE" in text)
        assert f'File "{file}", line {line}, in main\n    raise ValueError("here")  # LINE' in values["frames"]
        assert (values["name"], values["argv"]) == ("__main__", ["--port", "1"])
        assert on.stderr == off.stderr == ""

    def test_the_double_is_read_as_the_real_one_would_be(self, double: Path) -> None:
        """It fits the manifest, so that what a test changes in it is the only thing that is wrong."""
        ran = run(
            "from skyrl_r3 import manifest\nplan = manifest.plan()\n"
            "report(root=str(manifest.installed_skyrl()[1]), drifted=len(plan.drifted()), found=list(plan.found))",
            path=[double],
        )
        assert ran.values == {"root": str(double / "skyrl"), "drifted": 0, "found": self.targets}
