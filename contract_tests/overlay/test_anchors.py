"""``ci/anchors.py``: what became of each target in another SkyRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ci import anchors
from contract_tests.child import REPO
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import CLIENT, CONVERT, PREPROCESS, TRAINER, UTILS, manifest_030
from skyrl_r3.manifest import manifests, read_manifest

MANIFEST = REPO / "patches" / "skyrl-0.3.toml"
TARGETS = manifest_030().targets
POST = f"{CLIENT}.RemoteInferenceClient._post"
FILTER = f"{UTILS}.filter_generator_output"

DEEP = {"MemoryError": f"{'-' * 100_000}1", "RecursionError": f"x{'.x' * 100_000}"}


def anchored(*arguments: object) -> int:
    return anchors.main([str(argument) for argument in arguments])


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """What is printed for some arguments, line by line, and the exit status."""

    def tell(*arguments: object) -> tuple[list[str], int]:
        capsys.readouterr()
        status = anchored(*arguments)
        return [line.strip() for line in capsys.readouterr().out.splitlines()], status

    return tell


class Releases:
    """Doubles of SkyRL's package folder, and a manifest in which all targets of the first are the same."""

    def __init__(self, folder: Path, told: Any) -> None:
        self._folder = folder
        self.first = self("first")
        self.manifest = folder / "first.toml"
        self.manifest.write_text("\n".join(told("--skyrl", self.first, "--toml")[0]))

    def __call__(self, name: str, **changes: Any) -> Path:
        return fake_skyrl.build(self._folder / name, **changes) / "skyrl"


@pytest.fixture
def release(tmp_path: Path, told: Any) -> Releases:
    return Releases(tmp_path, told)


def states(lines: list[str]) -> list[str]:
    """State of each target, in the manifest's order."""
    return [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in ("same", "changed", "gone")]


def below(lines: list[str], target: str) -> list[str]:
    """What is printed for one target, from its own line up to the next one's or the next module's."""
    (start,) = [i for i, line in enumerate(lines) if line.split()[1:] == [target]]
    rest = lines[start + 1 :]
    end = next(i for i, line in enumerate(rest) if not line or line.split()[0] in ("same", "changed", "gone"))
    return [lines[start], *rest[:end]]


# The real one


def test_the_installed_skyrl_is_as_reviewed(told: Any) -> None:
    lines, status = told()
    assert status == 0
    assert states(lines) == ["same"] * len(TARGETS)
    assert lines[0].startswith("SkyRL 0.3.0 in ")
    assert lines[1] == "against skyrl-0.3.toml, reviewed with SkyRL 0.3.0"
    assert lines[-1] == f"{len(TARGETS)} same, 0 changed, 0 gone of {len(TARGETS)} targets: nothing to do"


def test_the_manifest_of_the_installed_skyrl_is_the_one_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert anchored("--toml") == 0
    assert capsys.readouterr().out == MANIFEST.read_text("utf-8")


# Doubles


def test_a_renewed_manifest_fits(release: Releases, told: Any) -> None:
    lines, status = told("--skyrl", release.first, "--manifest", release.manifest)
    assert (states(lines), status) == (["same"] * len(TARGETS), 0)
    renewed, shipped = read_manifest(release.manifest), read_manifest(MANIFEST)
    assert [(t.name, t.signature, t.what) for t in renewed.targets] == [
        (t.name, t.signature, t.what) for t in shipped.targets
    ]
    assert {t.sha256 for t in renewed.targets} & {t.sha256 for t in shipped.targets} == set()


def test_another_body(release: Releases, told: Any) -> None:
    """The new hash is printed, and it is the one that a renewed manifest has."""
    new = release("new")
    path = new.joinpath("train", "utils", "trainer_utils.py")
    path.write_text(path.read_text().replace(f"{{'stock': '{FILTER}'}}", "output"))
    arguments = ("--skyrl", new, "--manifest", release.manifest)
    lines, status = told(*arguments)
    renewed, _ = told(*arguments, "--toml")
    assert status == 1
    assert states(lines).count("same") == len(TARGETS) - 1
    state, why = below(lines, "filter_generator_output")
    assert state.startswith("changed")
    assert why.startswith("its source, not its signature")
    assert f'sha256 = "{why.split()[-1]}"' in renewed
    assert "every signature fits" in lines[-1]


def test_what_changed_between_two_releases(release: Releases, told: Any) -> None:
    new = release("new")
    path = new.joinpath("train", "utils", "trainer_utils.py")
    path.write_text(path.read_text().replace(f"{{'stock': '{FILTER}'}}", "output"))
    lines, _ = told("--skyrl", new, "--manifest", release.manifest, "--against", release.first)
    assert below(lines, "filter_generator_output")[2:] == [
        f"--- {release.first}",
        f"+++ {new}",
        "@@ -1,2 +1,2 @@",
        "def filter_generator_output(output, kept_indices):",
        f"-    return {{'stock': '{FILTER}'}}",
        "+    return output",
    ]
    assert sum(line.startswith("@@") for line in lines) == 1


def test_another_signature(release: Releases, told: Any) -> None:
    new = release("new", signatures={POST: "in @dataclass: async (self, address, json, *, headers=None)"})
    lines, status = told("--skyrl", new, "--manifest", release.manifest)
    assert status == 1
    assert [line.split(maxsplit=1)[1] for line in below(lines, "RemoteInferenceClient._post")[1:]] == [
        "in @dataclass: async (self, [-url,-] json, headers=None)",
        "in @dataclass: async (self, {+address,+} json, {+*,+} headers=None)",
    ]
    assert "refuses this SkyRL, as 1 of them do not fit" in lines[-1]


@pytest.mark.parametrize(
    ("expected", "found", "marks"),
    [
        ("(a)", "(a, b)", ("(a)", "(a, {+b)+}")),  # The bracket behind a does not make it another.
        ("(a, b)", "(b)", ("[-(a,-] b)", "(b)")),
        ("(a)", "async (a)", ("(a)", "{+async+} (a)")),
        ("()", "(a)", ("[-()-]", "{+(a)+}")),
        ("(a=(1,))", "(a=(1))", ("[-(a=(1,))-]", "{+(a=(1))+}")),
    ],
)
def test_marks(expected: str, found: str, marks: tuple[str, str]) -> None:
    assert tuple(line.split(maxsplit=1)[1] for line in anchors.marked(expected, found)) == marks


def test_gone_and_where_it_may_be_now(release: Releases, told: Any) -> None:
    moved = "class Outputs:\n    def filter_generator_output(self): ...\n"
    new = release("new", omit=[FILTER], bottom={UTILS: moved, CLIENT: "async def filter_generator_output(): ...\n"})
    lines, status = told("--skyrl", new, "--manifest", release.manifest)
    state, first, second = below(lines, "filter_generator_output")
    assert (state.split()[0], status) == ("gone", 1)
    # That of the target's own module comes first.
    assert (first.split()[3].split(":")[0], first.split()[-1]) == (UTILS, "Outputs.filter_generator_output")
    assert second.split()[3].split(":")[0] == CLIENT
    line = int(first.split()[3].split(":")[1])
    source = new.joinpath(*UTILS.split(".")[1:]).with_suffix(".py").read_text()
    assert source.splitlines()[line - 1] == "    def filter_generator_output(self): ..."


def test_gone_to_one_place_is_compared_with_what_is_there(release: Releases, told: Any) -> None:
    new = release("new", omit=[FILTER], bottom={TRAINER: "def filter_generator_output(output): ...\n"})
    lines, _ = told("--skyrl", new, "--manifest", release.manifest, "--against", release.first)
    assert "+def filter_generator_output(output): ..." in below(lines, "filter_generator_output")


def test_gone_to_one_of_many_places_is_not_compared_with_the_first(release: Releases, told: Any) -> None:
    more = "class C:\n    def filter_generator_output(self, first): ...\n"
    more += "class D:\n    def filter_generator_output(self, second): ...\n"
    new = release("new", omit=[FILTER], bottom={TRAINER: more})
    lines, _ = told("--skyrl", new, "--manifest", release.manifest, "--against", release.first)
    shown = below(lines, "filter_generator_output")
    assert len([line for line in shown if line.startswith("of that name:")]) == 2
    assert "-def filter_generator_output(output, kept_indices):" in shown
    assert [line for line in shown if line.startswith("+") and not line.startswith("+++")] == []


def test_files_that_hold_no_function(release: Releases, told: Any) -> None:
    """Those that Python itself could not read, and what only has the name of a file of Python's."""
    new = release("new", omit=[FILTER], bottom={TRAINER: "def filter_generator_output(output): ...\n"})
    (new / "broken.py").write_text("filter_generator_output (")
    for kind, text in DEEP.items():
        (new / f"{kind}.py").write_text(f"filter_generator_output = {text}")
    (new / "latin.py").write_bytes(b"\n\n# \xe9 filter_generator_output")
    (new / "folder.py").mkdir()
    (new / "dangling.py").symlink_to(new / "nowhere.py")
    lines, status = told("--skyrl", new, "--manifest", release.manifest)
    assert status == 1
    (place,) = below(lines, "filter_generator_output")[1:]
    assert place.startswith(f"of that name: {TRAINER}:")


def test_gone_without_a_trace(release: Releases, told: Any) -> None:
    new = release("new", omit=[FILTER])
    lines, _ = told("--skyrl", new, "--manifest", release.manifest)
    assert below(lines, "filter_generator_output")[1:] == ["no function of that name is left"]


def test_many_places_are_not_all_named(release: Releases, told: Any) -> None:
    more = "".join(f"class C{i}:\n    def filter_generator_output(self): ...\n" for i in range(8))
    lines, _ = told("--skyrl", release("new", omit=[FILTER], bottom={UTILS: more}), "--manifest", release.manifest)
    assert len(below(lines, "filter_generator_output")) == 1 + anchors.SHOWN + 1
    assert below(lines, "filter_generator_output")[-1] == f"and {8 - anchors.SHOWN} more"


def test_a_module_that_is_gone(release: Releases, told: Any) -> None:
    """An imported name goes with the module that defines it."""
    lines, _ = told("--skyrl", release("new", omit=[PREPROCESS]), "--manifest", release.manifest)
    gone = [line for line in lines if line.startswith("gone")]
    assert [line.split()[1] for line in gone] == [CONVERT, CONVERT]


def test_what_is_gone_stays_in_a_renewed_manifest(release: Releases, told: Any, tmp_path: Path) -> None:
    """So that it goes on refusing until somebody has decided what to do."""
    new = release("new", omit=[FILTER])
    lines, status = told("--skyrl", new, "--manifest", release.manifest, "--toml")
    assert status == 1
    assert "# Gone in SkyRL 0.3.0: filter_generator_output" in lines
    (tmp_path / "renewed.toml").write_text("\n".join(lines))
    assert read_manifest(tmp_path / "renewed.toml") == read_manifest(release.manifest)


# Releases and manifests


def test_a_renewed_manifest_is_for_the_line_that_it_was_made_from(release: Releases, told: Any, tmp_path: Path) -> None:
    """Or the overlay would go on refusing it, or take two manifests for one release."""
    for version, specifier in (
        ("0.3.4", ">=0.3.0,<0.4"),
        ("0.7.2", ">=0.7.2,<0.8"),
        ("1.2.0.dev3", ">=1.2.0.dev3,<1.3"),
    ):
        (tmp_path / "renewed.toml").write_text(
            "\n".join(told("--skyrl", release(version, version=version), "--manifest", release.manifest, "--toml")[0])
        )
        renewed = read_manifest(tmp_path / "renewed.toml")
        assert (renewed.skyrl, renewed.reviewed) == (specifier, version)


def test_a_release_without_a_manifest_is_compared_with_the_newest(release: Releases, told: Any) -> None:
    newest = max(manifests(), key=lambda manifest: Version(manifest.reviewed))
    lines, status = told("--skyrl", release("new", like=newest.reviewed, version="77.8.9"))
    assert status == 1
    assert lines[0].startswith("SkyRL 77.8.9 in ")
    assert lines[1].endswith(f"reviewed with SkyRL {newest.reviewed}")
    assert lines[2].startswith("No manifest is for this release: ")
    assert lines[2].endswith(f" is for {newest.skyrl}.")
    assert states(lines) == ["changed"] * len(newest.targets)
    assert "with no other manifest, the overlay leaves this SkyRL alone" in lines[-1]


def test_a_release_has_its_manifest_and_not_the_newest(release: Releases, told: Any) -> None:
    lines, _ = told("--skyrl", release("new", version="0.3.9rc1"))
    assert lines[1].startswith("against skyrl-0.3.toml")
    assert not any("No manifest" in line for line in lines)


@pytest.mark.parametrize(
    ("option", "text"),
    [("--skyrl", "expected SkyRL's package folder"), ("--against", "expected SkyRL's package folder")],
)
def test_a_folder_that_is_no_skyrl(option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        anchored(option, tmp_path)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def wrong_call(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line behind the usage."""
    with pytest.raises(SystemExit) as ended:
        anchored(*arguments)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    return said.err.partition(" error: ")[2]


def test_a_version_that_is_none(release: Releases, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be compared, but no manifest can be made for it."""
    new = release("new", version="weird")
    assert anchored("--skyrl", new, "--manifest", release.manifest) == 0
    capsys.readouterr()
    said = wrong_call(capsys, "--skyrl", new, "--manifest", release.manifest, "--toml")
    assert "Invalid version: 'weird'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("kind", DEEP)
def test_sources_that_cannot_be_read(kind: str, release: Releases, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a target that is nested too deep to be compared."""
    new = release("new")
    new.joinpath("train", "utils", "trainer_utils.py").write_text(DEEP[kind])
    said = wrong_call(capsys, "--skyrl", new, "--manifest", release.manifest)
    assert said.startswith(f"SkyRL 0.3.0 in {new} cannot be compared: {kind}")
    other = release("other")
    (other / "__init__.py").write_text(DEEP[kind])
    assert wrong_call(capsys, "--skyrl", other).count("\n") == 1


def test_no_manifest_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anchors, "REPO", tmp_path)
    assert wrong_call(capsys).startswith("no manifest: ")


ROW = "".join(f'{key} = "x"\n' for key in ("module", "attribute", "sha256", "replacement", "what", "why", "upstream"))


@pytest.mark.parametrize(
    "content",
    [
        None,
        "not toml",
        "skyrl = '>=1'",
        "skyrl = '1'\nreviewed = '1'\ntarget = [{a = 1}]",
        "skyrl = '>=1'\nreviewed = 'y'\ntarget = []",
        "skyrl = '>=1'\nreviewed = 3\ntarget = []",
        "skyrl = 3\nreviewed = '3'\ntarget = []",
        "skyrl = 'y'\nreviewed = '3'\ntarget = []",
        f"skyrl = '>=1'\nreviewed = '3'\n[[target]]\n{ROW}signature = 3",
    ],
)
def test_a_file_that_is_no_manifest(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "m.toml").write_text(content)
    with pytest.raises(SystemExit) as ended:
        anchored("--manifest", tmp_path / "m.toml")
    assert ended.value.code == 2
    assert "no manifest" in capsys.readouterr().err
