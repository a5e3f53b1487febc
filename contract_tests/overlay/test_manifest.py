"""The manifest against the installed SkyRL 0.3.0, and the reading of sources that the check is made of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from textwrap import dedent

import pytest

from contract_tests.child import run
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import CLIENT, PREPROCESS, TRAINER, manifest_030, manifest_of
from contract_tests.overlay.manifest_suite import ManifestContract
from skyrl_r3 import manifest
from skyrl_r3.errors import DriftError, R3Error, UnsupportedSkyRLError
from skyrl_r3.sources import Found, read_target

MANIFEST = manifest_030()


class TestManifest(ManifestContract):
    release = "0.3.0"


# Reading one target


def package(folder: Path, **modules: str) -> Path:
    """A package folder with ``modules``, dots written as ``__``."""
    for name, text in modules.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return folder


def test_read_missing_module(tmp_path: Path) -> None:
    assert read_target(package(tmp_path, a=""), "skyrl.b", "f") is None


def test_read_missing_attribute(tmp_path: Path) -> None:
    root = package(tmp_path, a="def g(): pass\nclass C:\n    def f(self): pass\nf = 1\n")
    assert read_target(root, "skyrl.a", "f") is None


def test_read_missing_class(tmp_path: Path) -> None:
    assert read_target(package(tmp_path, a="def f(): pass\n"), "skyrl.a", "C.f") is None


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("def f(): ...", "()"),
        ("def f(a: int, b: 'str' = 'x') -> None: ...", "(a, b='x')"),
        ("def f(a, /, b, *args: int, c=None, **kwargs: str): ...", "(a, /, b, *args, c=None, **kwargs)"),
        ("def f(*, a: list[int]): ...", "(*, a)"),
        ("async def f(a): ...", "async (a)"),
        ("@cache\ndef f(a): ...", "@cache (a)"),
        ("@outer(1)\n@staticmethod\nasync def f(a): ...", "@outer(1) @staticmethod async (a)"),
    ],
)
def test_read_signature(tmp_path: Path, source: str, signature: str) -> None:
    found = read_target(package(tmp_path, a=f"{source}\n"), "skyrl.a", "f")
    assert found is not None
    assert found.signature == signature


def test_read_method(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        sub__a="""
        class Other:
            def f(self, wrong): pass

        class C:
            class Inner:
                async def f(self, inner): pass

            @staticmethod
            def f(right=1): pass
        """,
    )
    method, inner = read_target(root, "skyrl.sub.a", "C.f"), read_target(root, "skyrl.sub.a", "C.Inner.f")
    assert method is not None
    assert inner is not None
    assert (method.signature, inner.signature) == ("@staticmethod (right=1)", "async (self, inner)")


def test_read_imported_name_is_the_function_it_names(tmp_path: Path) -> None:
    root = package(tmp_path, a="from skyrl.sub.b import (\n    f,\n    g,\n)\n", sub__b="def f(x): return 1\n")
    imported, defined = read_target(root, "skyrl.a", "f"), read_target(root, "skyrl.sub.b", "f")
    assert imported is not None
    assert imported == defined


def test_read_imported_name_whose_module_is_gone(tmp_path: Path) -> None:
    assert read_target(package(tmp_path, a="from skyrl.b import f\n"), "skyrl.a", "f") is None


def test_read_syntax_error(tmp_path: Path) -> None:
    """A module that cannot be parsed cannot be imported either: absent, and no exception."""
    assert read_target(package(tmp_path, a="def f(:\n"), "skyrl.a", "f") is None


def test_read_hashes_the_function_and_nothing_around_it(tmp_path: Path) -> None:
    before = read_target(package(tmp_path / "1", a="def f(a):\n    return a\n"), "skyrl.a", "f")
    moved = read_target(
        package(tmp_path / "2", a="import os\n\n\ndef f(a):\n    return a\n\n\nX = 1\n"), "skyrl.a", "f"
    )
    edited = read_target(package(tmp_path / "3", a="def f(a):\n    return -a\n"), "skyrl.a", "f")
    assert before is not None
    assert edited is not None
    assert before == moved
    assert before.sha256 == hashlib.sha256(b"def f(a):\n    return a").hexdigest()
    assert before.sha256 != edited.sha256


# The choice of a manifest

CHOOSE = """
from skyrl_r3 import errors, manifest

def choose():
    try:
        plan = manifest.plan()
        return {"version": plan.version, "reviewed": plan.manifest.reviewed}
    except errors.UnsupportedSkyRLError as error:
        return {"field": error.field, "expected": error.expected, "got": error.got, "message": str(error)}
"""
SUPPORTED = {
    "0.3.0": ["0.3.0", "0.3.1.dev1", "0.3.1rc1", "0.3.7", "0.3.0+local.1"],
    "0.4.0": ["0.4.0", "0.4.0.post1", "0.4.1.dev1", "0.4.1rc1", "0.4.7", "0.4.0+local.1"],
}
REVIEWED = {version: release for release, versions in SUPPORTED.items() for version in versions}
UNSUPPORTED = ["0.2.9", "0.3.0.dev3", "0.4.0.dev1", "0.4.0rc1", "0.5.0.dev1", "0.5.0rc1", "0.5.0", "1.0"]


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By version, what is chosen where that version is installed. All in one process, which sees one at a time."""
    folders = {
        version: str(fake_skyrl.build(tmp_path_factory.mktemp("skyrl"), version=version))
        for version in [*REVIEWED, *UNSUPPORTED]
    }
    return run(
        CHOOSE
        + f"""
import sys
chosen = {{}}
for version, folder in {folders!r}.items():
    sys.path.insert(0, folder)
    manifest.plan.cache_clear()
    chosen[version] = choose()
report(**chosen)
"""
    ).values


@pytest.mark.parametrize("version", REVIEWED)
def test_supported_version(choices: dict[str, dict[str, str]], version: str) -> None:
    assert choices[version] == {"version": version, "reviewed": REVIEWED[version]}


@pytest.mark.parametrize("version", UNSUPPORTED)
def test_unsupported_version_is_named_with_those_supported(choices: dict[str, dict[str, str]], version: str) -> None:
    refused = choices[version]
    assert refused["got"] == version
    assert version in refused["message"]
    for release in SUPPORTED:
        assert manifest_of(release).skyrl in refused["expected"]
        assert manifest_of(release).skyrl in refused["message"]


def hidden(metadata: Path | None = None) -> str:
    """Code that hides the installed SkyRL, and optionally shows the metadata in a folder instead."""
    shown = "" if metadata is None else f"sys.path.insert(0, {str(metadata)!r})"
    return f"""
import importlib.metadata, importlib.util, sys
{shown}
real_spec, real_version = importlib.util.find_spec, importlib.metadata.version
def version(name):
    if name == "skyrl":
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
importlib.util.find_spec = lambda name, package=None: None if name == "skyrl" else real_spec(name, package)
importlib.metadata.version = version
"""


def test_no_skyrl() -> None:
    ran = run(hidden() + CHOOSE + "report(**choose())")
    assert (ran.values["field"], ran.values["got"]) == ("skyrl", "none")


def test_only_the_older_package(tmp_path: Path) -> None:
    """``skyrl-train`` is what users of old guides have: say that it has no R3, instead of "not installed"."""
    info = tmp_path / "skyrl_train-0.3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl-train\nVersion: 0.3.1\n")
    ran = run(hidden(tmp_path) + CHOOSE + "report(**choose())")
    assert "skyrl-train 0.3.1" in ran.values["got"]
    assert "no R3" in ran.values["got"]


def test_a_package_that_does_not_say_its_version_has_that_of_its_metadata(tmp_path: Path) -> None:
    info = tmp_path / "skyrl-0.3.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl\nVersion: 0.3.5\n")
    ran = run(CHOOSE + "report(**choose())", path=[fake_skyrl.build(tmp_path, version=None)])
    assert ran.values["version"] == "0.3.5"


def test_the_package_on_the_path_counts_and_not_the_installed_one(tmp_path: Path) -> None:
    ran = run(
        "from skyrl_r3 import manifest\nversion, root = manifest.installed_skyrl()\n"
        "report(version=version, root=str(root))",
        path=[fake_skyrl.build(tmp_path, version="0.3.9")],
    )
    assert ran.values == {"version": "0.3.9", "root": str(tmp_path / "skyrl")}


# The error


def test_drift_error_names_target_expected_found_and_version() -> None:
    target = next(target for target in MANIFEST.targets if target.name == f"{CLIENT}.RemoteInferenceClient._post")
    found: dict[str, Found | None] = {t.name: Found(signature=t.signature, sha256=t.sha256) for t in MANIFEST.targets}
    found[target.name] = Found(signature="async (self, address)", sha256="0" * 64)
    error = manifest.Plan(version="0.3.7", manifest=MANIFEST, found=found).error()
    assert isinstance(error, DriftError)
    assert error.field == target.name
    assert error.expected == target.signature
    assert error.got == "async (self, address)"
    assert "0.3.7" in error.where
    for part in (error.field, error.expected, error.got, "0.3.7"):
        assert part in str(error)


@pytest.mark.parametrize(("version", "told"), [("0.3.0", True), ("0.3.7", False)])
def test_a_checkout_that_has_the_number_of_the_release_before_it(version: str, told: bool) -> None:
    """SkyRL's main called itself 0.3.0 for weeks, with other signatures. That number alone would look supported."""
    found: dict[str, Found | None] = dict.fromkeys([target.name for target in MANIFEST.targets])
    error = manifest.Plan(version=version, manifest=MANIFEST, found=found).error()
    assert error is not None
    assert ("not the SkyRL that was released as 0.3.0" in error.hint) is told
    assert "Use SkyRL 0.3.0 as released" in error.hint


def test_drift_error_of_an_absent_target_and_of_several() -> None:
    found: dict[str, Found | None] = {
        t.name: None if t.module in (PREPROCESS, TRAINER) else Found(signature=t.signature, sha256=t.sha256)
        for t in MANIFEST.targets
    }
    plan = manifest.Plan(version="0.3.7", manifest=MANIFEST, found=found)
    error = plan.error()
    assert error is not None
    assert {target.module for target in plan.drifted()} == {PREPROCESS, TRAINER}
    assert PREPROCESS in error.field
    assert "2 more" in error.field


def test_only_the_text_differs_is_edited_and_fits() -> None:
    found: dict[str, Found | None] = {t.name: Found(signature=t.signature, sha256="0" * 64) for t in MANIFEST.targets}
    plan = manifest.Plan(version="0.3.7", manifest=MANIFEST, found=found)
    assert plan.error() is None
    assert all(plan.edited(target) for target in MANIFEST.targets)
    count = len(MANIFEST.targets)
    assert plan.warning().startswith(
        f"{count} of the {count} functions that skyrl-r3 patches are not as in SkyRL 0.3.0"
    )
    assert f"{MANIFEST.targets[0].name} and {count - 1} more" in plan.warning()


def test_what_is_as_released_needs_no_warning() -> None:
    found: dict[str, Found | None] = {t.name: Found(signature=t.signature, sha256=t.sha256) for t in MANIFEST.targets}
    assert manifest.Plan(version="0.3.0", manifest=MANIFEST, found=found).warning() == ""


def test_overlay_errors_are_of_the_one_tree() -> None:
    assert issubclass(DriftError, R3Error)
    assert issubclass(UnsupportedSkyRLError, R3Error)
