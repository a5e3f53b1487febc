"""On, off, drift and order, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract_tests.child import run, run_python
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import (
    CLIENT,
    CONVERT,
    GENERATOR,
    MAIN_BLOCK,
    PREPROCESS,
    SERVER,
    TRAINER,
    UTILS,
    manifest_030,
)
from contract_tests.overlay.overlay_suite import ENDPOINTS, ENDS, OverlayContract

TARGETS = [target.name for target in manifest_030().targets]
MODULES = list(dict.fromkeys(target.module for target in manifest_030().targets))
POST = f"{CLIENT}.RemoteInferenceClient._post"
IMPORT_ALL = "import " + ", ".join(MODULES) + "\n"
IMPORT_CHEAP = f"import {UTILS}, {PREPROCESS}\n"
CHEAP = [name for name in TARGETS if name.rpartition(".")[0] in (UTILS, PREPROCESS)]
U = UTILS
P = f"{PREPROCESS}.{CONVERT}"


class TestOverlay(OverlayContract):
    release = "0.3.0"
    client_target = POST
    client_end = f"""
def client_end(flag):
    url = "http://127.0.0.1:1/" + ("skyrl/v1/generate" if flag else "inference/v1/generate")
    return outcome(lambda: {CLIENT}.RemoteInferenceClient()._post(url, json={{}}, headers=None))
"""


among = TestOverlay().among


# An edited SkyRL, as the double is


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_skyrl_that_fits_and_was_edited_is_told_when_routes_are_used(fake: Path, by_hand: bool) -> None:
    """Not before: with the flag off nobody asked for the overlay."""
    ran = run(
        f"""
        import io, logging
        said = io.StringIO()
        logging.basicConfig(stream=said, level=logging.WARNING)
        import skyrl_r3
        from skyrl_r3 import notes
        {"pass" if by_hand else "skyrl_r3.enable()"}
        import {PREPROCESS}, {UTILS}
        {"skyrl_r3.enable()" if by_hand else "pass"}
        before = said.getvalue()
        notes.note("")
        notes.say()
        notes.say()
        report(before=before, after=said.getvalue(), applied=states())
        """,
        path=[fake],
    )
    assert "WARNING" not in ran.values["before"]
    assert among(ran.values["applied"], "applied") == CHEAP
    count = len(TARGETS)
    assert ran.values["after"].count(f"{count} of the {count} functions that skyrl-r3 patches are not as in SkyRL") == 1
    assert ran.values["after"].count("WARNING") == 1


# Order


def test_enable_between_the_imports(fake: Path) -> None:
    """Some modules are there, the rest comes later; the trainer binds the function that is replaced already."""
    ran = run(
        f"""
        import {PREPROCESS}
        import skyrl_r3
        skyrl_r3.enable()
        before = states()
        import {TRAINER}
        after = states()
        same = {P} is {TRAINER}.{CONVERT}
        depth, function = 0, {TRAINER}.{CONVERT}
        while hasattr(function, "__wrapped__"):
            depth, function = depth + 1, function.__wrapped__
        skyrl_r3.disable()
        report(before=before, after=after, same=same, depth=depth,
               stock=[{P} is function, {TRAINER}.{CONVERT} is function])
        """,
        path=[fake],
    )
    assert among(ran.values["before"], "applied") == [P]
    assert among(ran.values["after"], "applied") == [name for name in TARGETS if name.startswith((PREPROCESS, TRAINER))]
    assert ran.values["same"]
    assert ran.values["depth"] == 1
    assert ran.values["stock"] == [True, True]


def test_each_module_alone(fake: Path) -> None:
    """Importing one target's module never patches, or needs, another's that SkyRL did not import."""
    code = "import sys, importlib\nfound = {}\n"
    for module in MODULES:
        code += f"importlib.import_module({module!r})\nfound[{module!r}] = states()\n"
    ran = run(code + "report(**found)", path=[fake], hook=True)
    imported: set[str] = set()
    for module in MODULES:
        imported |= {module} | ({PREPROCESS} if module == TRAINER else set())
        applied = [target.name for target in manifest_030().targets if target.module in imported]
        assert among(ran.values[module], "applied") == applied


def test_enable_twice_is_once(fake: Path) -> None:
    ran = run(
        f"""
        {IMPORT_CHEAP}
        import sys, skyrl_r3
        skyrl_r3.enable()
        first, finders = {P}, len(sys.meta_path)
        skyrl_r3.enable()
        same = {P} is first and len(sys.meta_path) == finders
        skyrl_r3.disable()
        report(same=same, stock=not patched({P}), finders=len(sys.meta_path) - finders)
        """,
        path=[fake],
    )
    assert ran.values == {"same": True, "stock": True, "finders": -1}


def test_hook_then_enable_is_once(fake: Path) -> None:
    ran = run(
        f"""
        {IMPORT_CHEAP}
        import skyrl_r3
        first = {P}
        skyrl_r3.enable()
        report(same={P} is first, states=states())
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values["same"]
    assert among(ran.values["states"], "applied") == CHEAP


def test_disable_leaves_later_imports_alone(fake: Path) -> None:
    ran = run(
        f"""
        import skyrl_r3, {UTILS}
        skyrl_r3.disable()
        import {PREPROCESS}
        report(patched=patched({P}), states=states(), detail=details()[{P!r}])
        """,
        path=[fake],
        hook=True,
    )
    assert not ran.values["patched"]
    assert among(ran.values["states"], "pending") == TARGETS
    assert ran.values["detail"] == "off"


def test_disable_with_nothing_enabled(fake: Path) -> None:
    ran = run(
        f"{IMPORT_CHEAP}\nimport skyrl_r3\nskyrl_r3.disable()\nskyrl_r3.disable()\nreport(s=states())", path=[fake]
    )
    assert among(ran.values["s"], "pending") == TARGETS
    assert ran.stderr == ""


# Somebody else patches too


@pytest.mark.parametrize("wraps", [True, False], ids=["wraps", "plain"])
def test_disable_leaves_a_wrapper_around_ours_and_names_it(fake: Path, wraps: bool) -> None:
    ran = run(
        f"""
        {IMPORT_CHEAP}
        import functools, skyrl_r3
        skyrl_r3.enable()
        ours, calls = {P}, []
        def their_wrapper(*args, **kwargs):
            calls.append(1)
            return ours(*args, **kwargs)
        theirs = functools.wraps(ours)(their_wrapper) if {wraps} else their_wrapper
        {P} = theirs
        on, on_detail = states(), details()[{P!r}]
        skyrl_r3.disable()
        off, off_detail = states(), details()[{P!r}]
        still = {P} is theirs
        answer = {P}(None, [], [], [], [])
        skyrl_r3.enable()
        again = states()
        {P} = ours
        back = states()[{P!r}]
        skyrl_r3.disable()
        report(on=on, on_detail=on_detail, off=off, off_detail=off_detail, still=still, answer=answer,
               calls=len(calls), again=again, back=back, stock=not patched({P}), end=states())
        """,
        path=[fake],
    )
    values = ran.values
    others = [name for name in CHEAP if name != P]
    assert among(values["on"], "superseded") == [P]
    assert among(values["on"], "applied") == others
    # Not among(..., "pending"): a wrapped one is neither ours to restore nor gone.
    assert among(values["off"], "superseded") == [P]
    assert among(values["off"], "applied") == []
    assert values["still"]
    assert (values["answer"], values["calls"]) == ({"stock": P}, 1)
    assert among(values["again"], "superseded") == [P]
    assert among(values["again"], "applied") == others
    assert values["back"] == "applied"
    assert values["stock"]
    assert among(values["end"], "pending") == TARGETS
    if not wraps:
        assert "their_wrapper" in values["on_detail"]
        assert "their_wrapper" in values["off_detail"]
        assert f"{P} stays as it is" in ran.stderr
        assert "their_wrapper" in ran.stderr


def test_somebody_patched_first(fake: Path) -> None:
    """Ours goes around theirs, and takes itself out again without theirs."""
    ran = run(
        f"""
        {IMPORT_CHEAP}
        import functools, skyrl_r3
        stock = {P}
        @functools.wraps(stock)
        def theirs(*args, **kwargs):
            return {{"theirs": stock(*args, **kwargs)}}
        {P} = theirs
        skyrl_r3.enable()
        applied, answer = states()[{P!r}], {P}(None, [], [], [], [])
        skyrl_r3.disable()
        report(applied=applied, answer=answer, back={P} is theirs)
        """,
        path=[fake],
    )
    assert ran.values == {"applied": "applied", "answer": {"theirs": {"stock": P}}, "back": True}


def test_the_others_are_restored_although_one_is_wrapped(fake: Path) -> None:
    ran = run(
        f"""
        {IMPORT_CHEAP}
        import skyrl_r3
        skyrl_r3.enable()
        {U}.filter_generator_output = lambda *args: None
        skyrl_r3.disable()
        report(patched=[patched({U}.handle_replace_sampling), patched({P})], states=states())
        """,
        path=[fake],
    )
    assert ran.values["patched"] == [False, False]
    assert among(ran.values["states"], "superseded") == [f"{U}.filter_generator_output"]


def test_another_import_hook_that_looks_for_the_same_module(fake: Path) -> None:
    """Post-import hooks of other packages ask every finder again, ours included: no endless search, one patch."""
    ran = run(
        f"""
        import importlib.util, sys
        class Other:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if self.busy or not name.startswith("skyrl."):
                    return None
                self.busy = True
                try:
                    return importlib.util.find_spec(name)
                finally:
                    self.busy = False
        for place in (0, len(sys.meta_path)):
            sys.meta_path.insert(place, Other())
        {IMPORT_CHEAP}
        report(applied=states(), once=not patched({P}.__wrapped__))
        """,
        path=[fake],
        hook=True,
    )
    assert among(ran.values["applied"], "applied") == CHEAP
    assert ran.values["once"]


# Drift


def drifted(folder: Path, kind: str) -> tuple[Path, str]:
    """A SkyRL whose target in the trainer utilities has drifted, and the name of the first drifted target."""
    name = f"{UTILS}.filter_generator_output"
    if kind == "signature":
        return fake_skyrl.build(folder, signatures={name: "(output, kept_indices, extra=None)"}), name
    if kind == "async":
        return fake_skyrl.build(folder, signatures={name: "async (output, kept_indices)"}), name
    return fake_skyrl.build(folder, omit=[name if kind == "attribute" else UTILS]), name


KINDS = ["signature", "async", "attribute", "module"]
REFUSALS = (
    ENDS
    + f"""
def post(url):
    client = {CLIENT}.RemoteInferenceClient
    return outcome(lambda: client()._post(url, json={{}}, headers=None))
"""
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", [False, True], ids=["no hook", "hook"])
def test_drift_enable_raises_and_applies_nothing(tmp_path: Path, kind: str, hook: bool) -> None:
    """In a process that has imported other targets, and with targets that come later."""
    folder, name = drifted(tmp_path, kind)
    ran = run(
        f"""
        import {PREPROCESS}, skyrl_r3
        from skyrl_r3 import autoload
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = raised
        import {GENERATOR}, {TRAINER}
        report(type=type(error).__name__, field=error.field, expected=error.expected, got=error.got, where=error.where,
               patched=[patched({P}), patched({TRAINER}.{CONVERT}),
                        patched({GENERATOR}.SkyRLGymGenerator._update_agent_loop_state_with_multiturn_chat_template)],
               states=states(), finder=autoload.installed())
        """,
        path=[folder],
        hook=hook,
    )
    values = ran.values
    assert values["type"] == "DriftError"
    assert name in values["field"]
    assert values["expected"] == "(output, kept_indices)"
    assert "0.3.0" in values["where"]
    assert values["got"] == {
        "signature": "(output, kept_indices, extra=None)",
        "async": "async (output, kept_indices)",
    }.get(kind, "nothing of that name")
    assert values["patched"] == [False, False, False]
    assert values["states"][name] == ("drifted" if kind in ("signature", "async") else "absent")
    assert among(values["states"], "applied") == []
    assert values["finder"] is hook


@pytest.mark.parametrize("kind", ["signature", "module"])
def test_drift_with_the_hook_alone(tmp_path: Path, kind: str) -> None:
    """Flag off: silent, and SkyRL answers for itself. Flag on: both ends of the wire raise the same error."""
    folder, name = drifted(tmp_path, kind)
    ran = run(
        IMPORT_ALL.replace(f"{UTILS}, ", "" if kind == "module" else f"{UTILS}, ")
        + REFUSALS
        + f"""
report(
    off=[post("http://127.0.0.1:1/inference/v1/generate"), server_end(False)],
    on=[post("http://127.0.0.1:1/skyrl/v1/generate"), server_end(True)],
    patched=[patched({P}), patched({TRAINER}.{CONVERT})],
)
""",
        path=[folder],
        hook=True,
    )
    assert ran.values["off"] == [["returned", {"stock": POST}], ["returned", {"stock": ENDPOINTS}]]
    for refused in ran.values["on"]:
        assert refused[0] == "DriftError"
        assert name in refused[1]
        assert "0.3.0" in refused[2]
    assert ran.values["patched"] == [False, False]
    assert ran.stderr == ""


@pytest.mark.parametrize("target", [POST, ENDPOINTS])
def test_drift_of_a_refusing_target_itself(tmp_path: Path, target: str) -> None:
    """The refusal does not rely on the signature that it does not know."""
    other = {POST: "async (self, address, *, body=None, **kwargs)", ENDPOINTS: "@staticmethod (app, engine, *, args)"}
    folder = fake_skyrl.build(tmp_path, signatures={target: other[target]})
    ran = run(
        f"import {CLIENT}, {SERVER}\n"
        + REFUSALS
        + f"""
args = SimpleNamespace(enable_return_routed_experts=True)
if {target == POST}:
    client = {CLIENT}.RemoteInferenceClient()
    on = [outcome(lambda: client._post(address="http://h/skyrl/v1/generate")), server_end(True)]
    off = outcome(lambda: client._post("http://h/inference/v1/generate", body={{}}))
else:
    actor = {SERVER}.VLLMServerActor
    on = [outcome(lambda: actor._add_custom_endpoints(None, None, args=args)), post("http://h/skyrl/v1/generate")]
    off = outcome(lambda: actor._add_custom_endpoints(None, None, args=SimpleNamespace()))
report(on=on, off=off)
""",
        path=[folder],
        hook=True,
    )
    assert [refused[:2] for refused in ran.values["on"]] == [["DriftError", target]] * 2
    assert ran.values["off"] == ["returned", {"stock": target}]


def test_drift_error_survives_pickling(tmp_path: Path) -> None:
    """Ray pickles what a task raises."""
    folder, name = drifted(tmp_path, "signature")
    ran = run(
        """
        import pickle, skyrl_r3
        try:
            skyrl_r3.enable()
        except Exception as error:
            copy = pickle.loads(pickle.dumps(error))
            report(type=type(copy).__name__, field=copy.field, got=copy.got, same=str(copy) == str(error))
        """,
        path=[folder],
    )
    assert ran.values == {
        "type": "DriftError",
        "field": name,
        "got": "(output, kept_indices, extra=None)",
        "same": True,
    }


@pytest.mark.parametrize("hook", [False, True], ids=["enable", "hook"])
def test_a_factory_that_raises_is_rolled_back(fake: Path, hook: bool) -> None:
    """Its module is as SkyRL made it, the original of the target before it included; the import itself succeeds."""
    ran = run(
        f"""
        from skyrl_r3.hooks import generator
        def broken(original):
            raise RuntimeError("broken on purpose")
        generator.handle_replace_sampling = broken
        import {UTILS}, skyrl_r3
        error = None
        try:
            if not {hook}:
                skyrl_r3.enable()
        except RuntimeError as raised:
            error = str(raised)
        report(error=error, patched=[patched({U}.filter_generator_output), patched({U}.handle_replace_sampling)],
               states=states())
        """,
        path=[fake],
        hook=hook,
    )
    assert ran.values["error"] == (None if hook else "broken on purpose")
    assert ran.values["patched"] == [False, False]
    assert among(ran.values["states"], "applied") == []
    assert ("broken on purpose" in ran.stderr) is hook


def test_enable_after_a_refused_import_raises_and_disable_puts_skyrl_back(tmp_path: Path) -> None:
    ran = run(
        f"""
        import {CLIENT}, skyrl_r3
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = type(raised).__name__
        skyrl_r3.disable()
        report(error=error, patched=patched({POST}))
        """,
        path=[fake_skyrl.build(tmp_path, omit=[f"{UTILS}.filter_generator_output"])],
        hook=True,
    )
    assert ran.values == {"error": "DriftError", "patched": False}


# Versions and the switch


def test_unsupported_version_is_one_warning_and_an_untouched_skyrl(tmp_path: Path) -> None:
    ran = run(
        f"""
        {IMPORT_ALL}
        import skyrl_r3
        patches = [patched({P}), patched({CLIENT}.RemoteInferenceClient._post)]
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = [type(raised).__name__, raised.got]
        report(patched=patches, status=skyrl_r3.status(), answer={P}(None, [], [], [], []), error=error,
               loader=type({PREPROCESS}.__loader__).__module__)
        """,
        path=[fake_skyrl.build(tmp_path, version="0.5.0")],
        hook=True,
    )
    assert ran.values["patched"] == [False, False]
    assert ran.values["status"] == []
    assert ran.values["answer"] == {"stock": P}
    assert ran.values["error"] == ["UnsupportedSkyRLError", "0.5.0"]
    assert not ran.values["loader"].startswith("skyrl_r3")
    lines = ran.stderr.splitlines()
    assert len(lines) == 1
    assert "0.5.0" in lines[0]
    assert manifest_030().skyrl in lines[0]


@pytest.mark.parametrize("value", ["off", "OFF", " off "])
def test_switched_off(fake: Path, value: str) -> None:
    ran = run(
        f"""
        import skyrl_r3, sys
        from skyrl_r3 import autoload
        {IMPORT_CHEAP}
        before = [autoload.installed(), patched({P}), "skyrl_r3.loader" in sys.modules]
        rows = skyrl_r3.enable()
        report(before=before, after=[autoload.installed(), patched({P})], states=states(), rows=len(rows),
               detail=sorted(set(details().values())))
        """,
        path=[fake],
        hook=True,
        env={"SKYRL_R3": value},
    )
    assert ran.values["before"] == [False, False, False]
    assert ran.values["after"] == [False, False]
    assert among(ran.values["states"], "pending") == TARGETS
    assert ran.values["detail"] == ["off"]
    assert ran.values["rows"] == len(TARGETS)
    assert ran.stderr.count("SKYRL_R3=off") == 1


@pytest.mark.parametrize("value", ["", "on", "1"])
def test_other_values_of_the_switch_leave_it_on(fake: Path, value: str) -> None:
    ran = run(f"{IMPORT_CHEAP}\nreport(on=patched({P}))", path=[fake], hook=True, env={"SKYRL_R3": value})
    assert ran.values["on"]


def test_a_version_that_is_none_is_unsupported(tmp_path: Path) -> None:
    """A checkout that does not say its version: an error of ours, and SkyRL's imports go on."""
    ran = run(
        f"""
        import importlib.metadata
        real = importlib.metadata.version
        def version(name):
            if name == "skyrl":
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)
        importlib.metadata.version = version
        import {PREPROCESS}, skyrl_r3
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = [type(raised).__name__, getattr(raised, "got", None)]
        report(error=error, status=skyrl_r3.status(), patched=patched({P}))
        """,
        path=[fake_skyrl.build(tmp_path, version=None)],
        hook=True,
    )
    assert ran.values == {"error": ["UnsupportedSkyRLError", "unknown"], "status": [], "patched": False}


# Modules stay what they were

INTROSPECT = f"""
import asyncio, importlib.util, inspect, linecache, pickle, sys
import cloudpickle
def same(value):
    return [pickle.loads(pickle.dumps(value)) is value, cloudpickle.loads(cloudpickle.dumps(value)) is value]
module = sys.modules[{CLIENT!r}]
client, actor = module.RemoteInferenceClient, {SERVER}.VLLMServerActor
"""


def test_patched_modules_look_like_unpatched_ones(fake: Path) -> None:
    """Names, signatures, kinds of attributes, files, specs, sources: whoever inspects SkyRL sees SkyRL."""
    code = (
        IMPORT_ALL
        + INTROSPECT
        + f"""
def facts(function):
    return [function.__name__, function.__qualname__, function.__module__, function.__doc__,
            str(inspect.signature(function)), inspect.iscoroutinefunction(function)]
spec = module.__spec__
report(
    functions=[facts({P}), facts({TRAINER}.{CONVERT}), facts(client._post), facts(actor._add_custom_endpoints),
               facts({GENERATOR}.SkyRLGymGenerator._update_agent_loop_state_with_multiturn_chat_template)],
    static=[type(inspect.getattr_static(actor, "_add_custom_endpoints")).__name__,
            type(inspect.getattr_static(client, "_post")).__name__],
    spec=[spec.name, spec.origin, spec.cached, spec.has_location, spec.submodule_search_locations, spec.parent],
    module=[module.__name__, module.__file__, module.__package__, module.__doc__, module.__cached__,
            sorted(name for name in vars(module))],
    source=[inspect.getsource(module), inspect.getsource({P}), inspect.getsource(client)],
    loader=[module.__loader__.get_filename({CLIENT!r}), module.__loader__.get_source({CLIENT!r}),
            module.__loader__.is_package({CLIENT!r}), module.__loader__ is spec.loader],
    pickles=[same({P}), same({TRAINER}.{CONVERT}), same({U}.filter_generator_output), same(client), same(actor)],
    call=asyncio.run(client()._post("http://h/elsewhere", json={{}})),
)
"""
    )
    without, patched = run(code, path=[fake]), run(code, path=[fake], hook=True)
    assert patched.values == without.values
    assert patched.values["pickles"] == [[True, True]] * 5
    assert patched.values["static"] == ["staticmethod", "function"]


def test_pickles_cross_from_a_patched_process_to_an_unpatched_one(fake: Path, tmp_path: Path) -> None:
    """By reference, as SkyRL's own functions: no pickle needs skyrl_r3 to be loaded."""
    start = f"""
import pickle, cloudpickle, pathlib, sys, {CLIENT}, {UTILS}, {PREPROCESS}
objects = [{P}, {U}.handle_replace_sampling, {CLIENT}.RemoteInferenceClient]
files = [pathlib.Path({str(tmp_path)!r}, name) for name in ("pickle", "cloudpickle")]
"""
    write = "for file, module in zip(files, (pickle, cloudpickle)): file.write_bytes(module.dumps(objects))\n"
    read = """
same = [[a is b for a, b in zip(pickle.loads(file.read_bytes()), objects)] for file in files]
report(same=same, overlay="skyrl_r3.overlay" in sys.modules)
"""
    there = run(start + write + f"report(on=patched({P}))", path=[fake], hook=True)
    here = run(start + read, path=[fake])
    assert there.values == {"on": True}
    assert here.values == {"same": [[True] * 3] * 2, "overlay": False}


def test_threads_that_import_at_once(fake: Path) -> None:
    """All modules from many threads, which ask for the status too: each target is patched once, and nothing hangs."""
    ran = run(
        f"""
        import importlib, sys, threading
        import skyrl_r3
        modules, errors, barrier = {MODULES!r}, [], threading.Barrier(16)
        sys.setswitchinterval(1e-5)
        def work(number):
            barrier.wait()
            try:
                for module in modules[number % 6:] + modules[:number % 6]:
                    importlib.import_module(module)
                    skyrl_r3.status()
            except BaseException as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        function = sys.modules[{TRAINER!r}].{CONVERT}
        report(errors=errors, alive=sum(thread.is_alive() for thread in threads), states=states(),
               once=patched(function) and not patched(function.__wrapped__))
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values["errors"] == []
    assert ran.values["alive"] == 0
    assert among(ran.values["states"], "applied") == TARGETS
    assert ran.values["once"]


def test_a_module_that_cannot_be_imported_fails_as_without_the_hook(tmp_path: Path) -> None:
    """Its own exception, no leftovers in sys.modules, and a second import can succeed."""
    folder = fake_skyrl.build(tmp_path, top={UTILS: "import builtins\nassert hasattr(builtins, 'ready'), 'not yet'"})
    ran = run(
        f"""
        import builtins, sys, traceback
        try:
            import {UTILS}
            error = None
        except AssertionError as raised:
            error = [str(raised), traceback.extract_tb(raised.__traceback__)[-1].filename]
        left = {UTILS!r} in sys.modules
        builtins.ready = True
        import {UTILS}
        report(error=error, left=left, patched=patched({U}.filter_generator_output))
        """,
        path=[folder],
        hook=True,
    )
    file = str(folder / "skyrl" / "train" / "utils" / "trainer_utils.py")
    assert ran.values == {"error": ["not yet", file], "left": False, "patched": True}


def test_a_reloaded_class_is_patched_again(fake: Path) -> None:
    ran = run(
        f"""
        import importlib, {CLIENT}
        importlib.reload({CLIENT})
        report(patched=patched({CLIENT}.RemoteInferenceClient._post), state=states()[{POST!r}])
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values == {"patched": True, "state": "applied"}


def test_enable_after_a_reload_that_no_hook_saw(fake: Path) -> None:
    """disable, reload, enable: nothing of the first module is left over."""
    ran = run(
        f"""
        import importlib, {PREPROCESS}, skyrl_r3
        skyrl_r3.enable()
        skyrl_r3.disable()
        importlib.reload({PREPROCESS})
        skyrl_r3.enable()
        report(on=[patched({P}), states()[{P!r}]])
        """,
        path=[fake],
    )
    assert ran.values == {"on": [True, "applied"]}


# python -m


def test_python_m_of_a_module_without_main_block(tmp_path: Path, wheel_python: Path) -> None:
    """Patched at its end: what runs later sees the replacement."""
    late = """
import atexit, json
atexit.register(lambda: print("REPORT " + json.dumps({"on": hasattr(filter_generator_output, "__wrapped__")})))
"""
    folder = fake_skyrl.build(tmp_path, bottom={UTILS: late})
    assert run_python([str(wheel_python), "-m", UTILS], path=[folder]).values == {"on": True}


def test_python_m_under_drift_refuses(tmp_path: Path, wheel_python: Path) -> None:
    """A server that is started with the flag on says at once that the overlay does not fit."""
    main = """
from types import SimpleNamespace
def main():
    VLLMServerActor._add_custom_endpoints(None, None, SimpleNamespace(enable_return_routed_experts=True))
"""
    name = f"{UTILS}.filter_generator_output"
    folder = fake_skyrl.build(tmp_path, omit=[name], bottom={SERVER: main + MAIN_BLOCK})
    ran = run_python([str(wheel_python), "-m", SERVER], path=[folder], check=False)
    assert ran.returncode == 1
    assert "DriftError" in ran.stderr
    assert name in ran.stderr


def test_multiprocessing_spawn_from_a_patched_main(tmp_path: Path, wheel_python: Path) -> None:
    """vLLM's engine processes are spawned: the child runs the parent's module again, under another name."""
    main = """
import json, multiprocessing
def child(queue):
    queue.put([__name__, hasattr(VLLMServerActor.__dict__["_add_custom_endpoints"].__func__, "__wrapped__")])
def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    name, patched = queue.get(timeout=120)
    process.join(120)
    print("REPORT " + json.dumps({"name": name, "patched": patched, "code": process.exitcode}))
"""
    folder = fake_skyrl.build(tmp_path, bottom={SERVER: main + MAIN_BLOCK})
    ran = run_python([str(wheel_python), "-m", SERVER], path=[folder])
    assert ran.values == {"name": "__mp_main__", "patched": True, "code": 0}


# The real SkyRL 0.3.0


def test_real_client_and_server_modules() -> None:
    """Hook, then import: applied with nothing to remark; pickles, sources and kinds as they were; off again."""
    ran = run(
        f"import {CLIENT}, {SERVER}\n"
        + INTROSPECT
        + f"""
import skyrl_r3
on, remarks = states(), details()
instance = client(proxy_url="http://127.0.0.1:1", server_urls=["http://127.0.0.1:1"], data_parallel_size=1)
copy = cloudpickle.loads(pickle.dumps(instance))
facts = [type(inspect.getattr_static(actor, "_add_custom_endpoints")).__name__,
         inspect.iscoroutinefunction(client._post), "def _post" in inspect.getsource(client._post),
         len(inspect.getsource(module)) > 10_000, list(inspect.signature(client._post).parameters),
         copy.proxy_url == instance.proxy_url]
replaced, original = client._post, client._post.__wrapped__
skyrl_r3.disable()
report(on=on, remarks=[remarks[{POST!r}], remarks[{ENDPOINTS!r}]], facts=facts, off=states(),
       pickles=[same(client), same(actor)], restored=client._post is original)
""",
        hook=True,
    )
    assert {POST, ENDPOINTS} <= set(among(ran.values["on"], "applied"))
    assert ran.values["remarks"] == ["", ""]
    assert ran.values["facts"] == ["staticmethod", True, True, True, ["self", "url", "json", "headers"], True]
    assert ran.values["pickles"] == [[True, True], [True, True]]
    assert ran.values["restored"]
    assert among(ran.values["off"], "applied") == []


def test_real_trainer_side_modules() -> None:
    """One process imports all of the trainer's side: everything applied, nothing to remark, and off again."""
    ran = run(
        f"""
        import {TRAINER}, {GENERATOR}, skyrl_r3
        on, remarks = states(), details()
        one = {P} is {TRAINER}.{CONVERT}
        skyrl_r3.disable()
        off = [patched({P}), patched({TRAINER}.{CONVERT}), patched({TRAINER}.RayPPOTrainer.convert_to_training_input)]
        skyrl_r3.enable()
        report(on=on, remarks=sorted({{remarks[name] for name, state in on.items() if state == "applied"}}), one=one,
               off=off, again=states() == on)
        """,
        hook=True,
    )
    trainer_side = [name for name in TARGETS if name not in (POST, ENDPOINTS)]
    assert set(trainer_side) <= set(among(ran.values["on"], "applied"))
    assert ran.values["remarks"] == [""]
    assert ran.values["one"]
    assert ran.values["off"] == [False, False, False]
    assert ran.values["again"]
