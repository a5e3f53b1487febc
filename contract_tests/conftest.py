"""What is run: which implementation, in which profile, and which parts of the suite can be run here.

``--impl NAME`` chooses the implementation, ``--hypothesis-profile ci|nightly|dev`` how much chance there is, and
``--report FILE`` writes what was found as JSON.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("pytest", "hypothesis", "numpy", "orjson", "pybase64")

try:
    from hypothesis import HealthCheck, Phase, errors, settings

    from contract_tests import adapter, deviations
    from contract_tests.adapter import Adapter
    from contract_tests.corruption import FED
    from contract_tests.parts import HERE, PARTS, part_of
    from contract_tests.report import Recorder
except ModuleNotFoundError as _error:
    if _error.name in PACKAGES:
        raise ImportError(f"{_error}: pip install {' '.join(PACKAGES)}") from None
    raise

# Examples on a busy machine take any time, so nothing here has a deadline. What fails can be pasted into a test.
_ALWAYS: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
# Without the phase that explains a failure: it runs the test under sys.monitoring, new in Python 3.12, for no more than
# comments on what is printed anyway.
_PHASES = tuple(phase for phase in Phase if phase is not Phase.explain)
settings.register_profile(
    "ci", derandomize=True, max_examples=150, report_multiple_bugs=False, phases=_PHASES, **_ALWAYS
)
settings.register_profile("dev", max_examples=100, **_ALWAYS)
# No database: a nightly run on a clean machine has none either.
settings.register_profile("nightly", max_examples=1_500, database=None, report_multiple_bugs=False, **_ALWAYS)
settings.load_profile("ci")

_IMPL = pytest.StashKey[Adapter]()
_DEVIATIONS = pytest.StashKey[list[deviations.Deviation]]()
_NOT_RUN = pytest.StashKey[dict[str, str]]()
_RECORDER = pytest.StashKey[Recorder]()

pytest.register_assert_rewrite("contract_tests.oracle")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's own options."""
    group = parser.getgroup("contract")
    names = ", ".join(adapter.NAMES)
    group.addoption("--impl", default="overlay", help=f"what is tested: {names}, or package.module:Class [overlay]")
    group.addoption("--report", type=Path, help="file for what was found, as JSON")
    if importlib.util.find_spec("pytest_asyncio") is None:
        # Its options are in pyproject.toml. The codec part does without it, and pytest would warn of each.
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "of pytest-asyncio, which is not installed")


# First, so that an unknown profile is met here and not by hypothesis.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Find the implementation.

    Raises:
        pytest.UsageError: It cannot be tested, or the command line asks for what cannot be done here: to do less would
            look like success.
    """
    _clear_report(config.getoption("report"))
    if config.getoption("dist", "no") != "no":
        raise pytest.UsageError("leave out -n: what is found is counted in one process")
    profile, versions = _environment(config)
    # `python -m pytest` finds an adapter in the current folder, and plain `pytest` shall too.
    sys.path.append(str(config.invocation_params.dir))
    try:
        impl = config.stash[_IMPL] = adapter.load(str(config.getoption("impl")))
    except adapter.UnknownImplementationError as error:
        raise pytest.UsageError(f"--impl {error}") from error
    try:
        known = config.stash[_DEVIATIONS] = deviations.read(impl.name)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if why := deviations.for_others(known, impl):
        raise pytest.UsageError(why)
    not_run = {part: why for part in PARTS if (why := part.why_not(impl))}
    config.stash[_NOT_RUN] = {part.folder: why for part, why in not_run.items()}
    for argument in config.args:
        part = part_of(_path(config, argument))
        if part in not_run:
            raise pytest.UsageError(f"{argument}: {not_run[part]}")
    under_test = impl.versions()
    facts = {"implementation": impl.name, "under_test": under_test, "profile": profile}
    facts |= {"versions": under_test | versions}
    config.stash[_RECORDER] = Recorder(facts, config.stash[_NOT_RUN], known, _selected(config))


def _environment(config: pytest.Config) -> tuple[str, dict[str, str]]:
    """The profile, and the versions of what the suite needs."""
    profile = config.getoption("hypothesis_profile", default=None) or "ci"
    try:
        settings.get_profile(profile)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    except errors.InvalidArgument as error:
        raise pytest.UsageError(f"--hypothesis-profile {profile}: expected ci, dev or nightly") from error
    except importlib.metadata.PackageNotFoundError as error:
        raise pytest.UsageError(f"{error}: pip install {' '.join(PACKAGES)}") from error
    return profile, {"python": platform.python_version()} | versions


def _clear_report(path: Path | None) -> None:
    """Take away what an earlier run has written, and see whether this one can write."""
    if path is not None:
        try:
            path.open("ab").close()
            if path.is_file():
                path.unlink()
        except OSError as error:
            raise pytest.UsageError(f"--report {path}: {error.strerror}") from error


def _path(config: pytest.Config, argument: str) -> Path:
    return (config.invocation_params.dir / argument.partition("::")[0]).resolve()


_SELECTING = {"keyword": "-k", "markexpr": "-m", "deselect": "--deselect", "ignore": "--ignore", "lf": "--lf"}
_SELECTING |= {"ignore_glob": "--ignore-glob"}


def _selected(config: pytest.Config) -> list[str]:
    """What of the command line asks for less than whole parts."""
    names = [argument for argument in config.args if not _path(config, argument).is_dir()]
    given = {flag: config.getoption(option, None) for option, flag in _SELECTING.items()}
    return names + [f"{flag} {value}" for flag, value in given.items() if value]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the parts that cannot be run here. They are named at the end."""
    part, not_run = part_of(collection_path), config.stash[_NOT_RUN]
    # A folder of a part that cannot be run may hold a part that can.
    inner = any((HERE / other.folder).is_relative_to(collection_path) for other in PARTS if other.folder not in not_run)
    return True if part is not None and part.folder in not_run and not inner else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the implementation is not able to do, and mark what it is known to do wrong."""
    impl, recorder = config.stash[_IMPL], config.stash[_RECORDER]
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    # Of a file named with a test, and after --lf, only some tests are here.
    whole = {_path(config, argument) for argument in config.args if "::" not in argument}
    deviations.apply(config.stash[_DEVIATIONS], mine, whole if not config.getoption("lf", False) else ())
    known = {deviation.test for deviation in config.stash[_DEVIATIONS]}
    dropped = []
    for item in mine:
        needed = [name for mark in item.iter_markers("capability") for name in mark.args]
        missing = [f"quirks say no {name}" for name in needed if name not in impl.quirks.capabilities]
        if missing and deviations.name_of(item) in known:
            name = deviations.name_of(item)
            raise pytest.UsageError(f"{deviations.FILE.name}: {impl.name}: {name} cannot fail: {missing[0]}")
        if "tensors" in needed and importlib.util.find_spec("torch") is None:
            missing.append("torch is not installed")
        missing += [
            f"{name} is not installed"
            for mark in item.iter_markers("importable")
            for name in mark.args
            if not _there(name)
        ]
        if missing:
            recorder.left_out(item, missing[0])
            dropped.append(item)
    recorder.planned = len(mine) - len(dropped)
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


@cache
def _there(name: str) -> bool:
    try:
        adapter.load(name)
    except adapter.UnknownImplementationError:
        return False
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a whole reply for each encoding that the implementation ``reads`` or ``writes``."""
    for verb in {"reads", "writes"} & set(metafunc.fixturenames):
        # With the capability as a mark, so that an implementation without it is reported as such.
        names = [pytest.param(name, marks=pytest.mark.capability(f"{verb} {name}")) for name in adapter.ENCODINGS]
        metafunc.parametrize(verb, names)


@pytest.fixture(scope="session")
def impl(pytestconfig: pytest.Config) -> Adapter:
    """The implementation under test."""
    return pytestconfig.stash[_IMPL]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What is under test, and what is not run."""
    facts = config.stash[_RECORDER].facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"implementation: {facts['implementation']}, profile: {facts['profile']}", f"versions: {versions}"]
    return lines + [f"not run: {folder}: {why}" for folder, why in config.stash[_NOT_RUN].items()]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Any:
    """An implementation that calls ``pytest.exit`` does not end the run as a success."""
    try:
        return (yield)
    except pytest.exit.Exception as error:
        error.returncode = error.returncode or pytest.ExitCode.INTERRUPTED
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep what came of each test. An implementation that skips a test, or breaks before it, has not done it."""
    made = yield
    if made.skipped and call.excinfo is not None and (why := _unexpected(item, call)):
        made.outcome, made.longrepr = "failed", f"{call.excinfo.getrepr(style='short')}\n{why}"
        if hasattr(made, "wasxfail"):
            del made.wasxfail
    item.config.stash[_RECORDER].add(item, made)
    return made


def _unexpected(item: pytest.Item, call: pytest.CallInfo[None]) -> str:
    """Why a test that did not pass must not count as skipped or as a known deviation. Empty: it may."""
    assert call.excinfo is not None
    if call.excinfo.errisinstance((pytest.skip.Exception, pytest.xfail.Exception)):
        marked = call.when == "setup" and any(mark.args[0] for mark in item.iter_markers("skipif"))
        return "" if marked else "skipped by what is tested"
    return "" if call.when == "call" else f"a known deviation is one of the test, not of its {call.when}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report."""
    if (path := session.config.getoption("report")) is not None:
        session.config.stash[_RECORDER].write(path, dict(FED), int(session.exitstatus))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was tested and what not, and how many corrupted payloads there were."""
    for line in config.stash[_RECORDER].summary(dict(FED)):
        terminalreporter.write_line(line)
