"""Less common ways to meet the overlay: reloads, imports that are still running, odd launchers, late switches."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract_tests.child import run, run_python
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import CLIENT, CONVERT, PREPROCESS, SERVER, TRAINER, UTILS, manifest_030
from skyrl_r3.sources import read_target

P = f"{PREPROCESS}.{CONVERT}"
POST = f"{CLIENT}.RemoteInferenceClient._post"
SCREENED = f"{UTILS}.filter_generator_output"


# Modules that are executed again, or not to their end yet


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "enable"])
def test_a_reloaded_module_is_patched_again(fake: Path, hook: bool) -> None:
    """Notebooks reload. A reload makes SkyRL's functions anew: nobody superseded us, and the flag is still on."""
    ran = run(
        f"""
        import importlib, {PREPROCESS}, skyrl_r3
        if not {hook}:
            skyrl_r3.enable()
        importlib.reload({PREPROCESS})
        reloaded = [patched({P}), states()[{P!r}]]
        skyrl_r3.disable()
        off = [patched({P}), states()[{P!r}]]
        skyrl_r3.enable()
        report(reloaded=reloaded, off=off, again=[patched({P}), states()[{P!r}]])
        """,
        path=[fake],
        hook=hook,
    )
    assert ran.values == {"reloaded": [True, "applied"], "off": [False, "pending"], "again": [True, "applied"]}


def test_a_module_that_is_imported_a_second_time_is_the_one_reported(fake: Path) -> None:
    """Test suites drop modules from sys.modules. The status is that of the module that callers import now."""
    ran = run(
        f"""
        import sys, {PREPROCESS}, skyrl_r3
        old = sys.modules.pop({PREPROCESS!r})
        import {PREPROCESS}
        new = sys.modules[{PREPROCESS!r}]
        on = [new is not old, patched(new.{CONVERT}), states()[{P!r}]]
        new.{CONVERT} = print
        state = states()[{P!r}]
        report(on=on, state=state)
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values == {"on": [True, True, "applied"], "state": "superseded"}


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "no hook"])
def test_enable_while_a_target_is_being_imported(tmp_path: Path, hook: bool) -> None:
    """A module that calls ``enable()`` may itself be imported by SkyRL, or run in another thread.

    The half-executed module is pending; with the import hook in place it is patched when it is done.
    """
    folder = fake_skyrl.build(tmp_path, top={UTILS: "import skyrl_r3\nskyrl_r3.enable()"})
    ran = run(
        f"import {UTILS}, skyrl_r3\nskyrl_r3.enable()\nreport(on=patched({SCREENED}), state=states()[{SCREENED!r}])",
        path=[folder],
        hook=hook,
    )
    assert ran.values == {"on": True, "state": "applied"}


# All or nothing, when a hook itself fails

BREAK = """
from skyrl_r3.hooks import generator
def broken(original):
    raise RuntimeError("broken on purpose")
generator.handle_replace_sampling = broken
"""


def test_a_failed_enable_leaves_no_import_hook(fake: Path) -> None:
    """Else targets that are imported later are patched although ``enable()`` raised: half an overlay."""
    ran = run(
        BREAK
        + f"""
import {UTILS}, skyrl_r3
from skyrl_r3 import autoload
try:
    skyrl_r3.enable()
except RuntimeError:
    pass
import {PREPROCESS}
report(finder=autoload.installed(), patched=patched({P}))
""",
        path=[fake],
    )
    assert ran.values == {"finder": False, "patched": False}


def test_a_hook_that_fails_is_not_reported_as_yet_to_be_imported(fake: Path) -> None:
    ran = run(
        BREAK + f"import {UTILS}\nreport(state=states()[{SCREENED!r}], detail=details()[{SCREENED!r}])",
        path=[fake],
        hook=True,
    )
    assert "not imported yet" not in ran.values["detail"]
    assert ran.values["state"] != "applied"


@pytest.mark.parametrize("end", ["fails", "disable"])
def test_a_name_that_was_bound_before_the_overlay_was_taken_back(tmp_path: Path, end: str) -> None:
    """SkyRL's trainer imports the preprocessing by name first, and the trainer utilities later.

    If a patch fails there, or the overlay is disabled there, the trainer holds a replacement that nobody else has.
    """
    taken_back = f"import {UTILS}" if end == "fails" else "import skyrl_r3\nskyrl_r3.disable()"
    folder = fake_skyrl.build(tmp_path, bottom={TRAINER: taken_back})
    ran = run(
        (BREAK if end == "fails" else "")
        + f"""
import {TRAINER}, skyrl_r3
stock = [{PREPROCESS}.{CONVERT}, {TRAINER}.{CONVERT}]
report(patched=[patched(function) for function in stock], same=stock[0] is stock[1], states=states(),
       other=patched({TRAINER}.RayPPOTrainer.convert_to_training_input))
""",
        path=[folder],
        hook=True,
    )
    assert ran.values["patched"] == [False, False]
    assert ran.values["same"]
    assert not ran.values["other"]
    assert set(ran.values["states"].values()) == {"drifted" if end == "fails" else "pending"}


# What the status says under drift


def test_a_refusal_is_not_reported_as_applied(tmp_path: Path) -> None:
    """Nothing is applied under drift, so no row may say so: ``_post`` fits, but what is there refuses."""
    ran = run(
        f"import {CLIENT}\nreport(states=states())",
        path=[fake_skyrl.build(tmp_path, omit=[SCREENED])],
        hook=True,
    )
    assert "applied" not in ran.values["states"].values()
    assert ran.values["states"][SCREENED] == "absent"


# The switch, set in the process itself


def test_switch_set_before_skyrl_is_imported(fake: Path) -> None:
    """``os.environ["SKYRL_R3"] = "off"`` at the top of a script: it comes after the ``.pth`` file, and still counts."""
    ran = run(
        f"""
        import os
        os.environ["SKYRL_R3"] = "off"
        import {PREPROCESS}
        report(patched=patched({P}), state=states()[{P!r}], detail=details()[{P!r}])
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values == {"patched": False, "state": "pending", "detail": "off"}


# Other ways to run a module


@pytest.mark.parametrize("arguments", ["", "run_name='__main__'", "run_name='other'", "run_name='x', alter_sys=True"])
def test_run_module(tmp_path: Path, arguments: str) -> None:
    """``runpy.run_module``, as profilers and debuggers use it, makes no module in sys.modules unless asked."""
    main = "if __name__ == '__main__':\n    SEEN = hasattr(filter_generator_output, '__wrapped__')"
    folder = fake_skyrl.build(tmp_path, bottom={UTILS: main})
    ran = run(
        f"""
        import runpy
        names = runpy.run_module({UTILS!r}, {arguments})
        report(patched=patched(names["filter_generator_output"]), seen=names.get("SEEN"), leak="skyrl_r3" in names)
        """,
        path=[folder],
        hook=True,
    )
    assert ran.values == {"patched": True, "seen": True if "__main__" in arguments else None, "leak": False}
    assert ran.stderr == ""


@pytest.mark.parametrize("test", ['"__main__" == __name__', '__name__ == "__main__" and True'])
def test_python_m_with_another_form_of_main_block(tmp_path: Path, wheel_python: Path, test: str) -> None:
    main = f"""
if {test}:
    import json
    print("REPORT " + json.dumps({{"on": hasattr(filter_generator_output, "__wrapped__")}}))
"""
    folder = fake_skyrl.build(tmp_path, bottom={UTILS: main})
    assert run_python([str(wheel_python), "-m", UTILS], path=[folder]).values == {"on": True}


# Loaders and finders


def test_the_loader_can_be_copied(fake: Path) -> None:
    ran = run(
        f"""
        import copy, pickle, {PREPROCESS}
        loader = {PREPROCESS}.__loader__
        report(copied=copy.copy(loader).get_filename({PREPROCESS!r}) == loader.get_filename({PREPROCESS!r}),
               deep=copy.deepcopy({PREPROCESS}.__spec__).name,
               pickled=pickle.loads(pickle.dumps(loader)).get_filename({PREPROCESS!r}) == {PREPROCESS}.__file__)
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values == {"copied": True, "deep": PREPROCESS, "pickled": True}


def test_a_second_finder_of_ours_does_not_search_for_ever(fake: Path) -> None:
    """A reload of skyrl_r3.autoload, or a second copy of the package, makes another finder object."""
    ran = run(
        f"""
        import importlib, skyrl_r3
        from skyrl_r3 import autoload
        importlib.reload(autoload)
        autoload.start()
        import {PREPROCESS}
        report(on=patched({P}), once=not patched({P}.__wrapped__))
        """,
        path=[fake],
        hook=True,
    )
    assert ran.values == {"on": True, "once": True}


# Reading sources that are not written like today's


def sources(folder: Path, **modules: str) -> Path:
    """A package folder with ``modules``."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_read_a_name_that_is_imported_under_another_name(tmp_path: Path) -> None:
    """``from b import f as g`` binds ``g``: a caller's ``f`` is gone, and its ``g`` is b's ``f``."""
    root = sources(tmp_path, a="from skyrl.b import f as g\n", b="def f(x): ...\n")
    assert read_target(root, "skyrl.a", "f") is None
    found = read_target(root, "skyrl.a", "g")
    assert found is not None
    assert found.signature == "(x)"


def test_drift_of_a_caller_that_imports_under_another_name(tmp_path: Path) -> None:
    """The same, end to end: the trainer's name is gone, so nothing is patched, and ``enable()`` says so."""
    folder = fake_skyrl.build(
        tmp_path, omit=[f"{TRAINER}.{CONVERT}"], top={TRAINER: f"from {PREPROCESS} import {CONVERT} as convert"}
    )
    ran = run(
        f"""
        import {PREPROCESS}, {TRAINER}, skyrl_r3
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = type(raised).__name__
        report(error=error, patched=patched({P}))
        """,
        path=[folder],
    )
    assert ran.values == {"error": "DriftError", "patched": False}


def test_read_a_relative_import(tmp_path: Path) -> None:
    root = sources(tmp_path, a="from .b import f\n", b="def f(x): ...\n")
    found = read_target(root, "skyrl.a", "f")
    assert found is not None
    assert found.signature == "(x)"


def test_read_an_import_from_another_package(tmp_path: Path) -> None:
    """SkyRL's own module of that name is not the one that is imported."""
    root = sources(tmp_path, a="from elsewhere.b import f\n", b="def f(wrong): ...\n")
    assert read_target(root, "skyrl.a", "f") is None


def test_read_a_function_that_is_defined_again(tmp_path: Path) -> None:
    """The last definition is the one that callers get; overloads come first."""
    text = "@overload\ndef f(x: int): ...\n@overload\ndef f(x: str): ...\ndef f(x, y=1): return x\n"
    found = read_target(sources(tmp_path, a=text), "skyrl.a", "f")
    assert found is not None
    assert found.signature == "(x, y=1)"


def test_imports_in_a_circle_are_absent(tmp_path: Path) -> None:
    root = sources(tmp_path, a="from skyrl.b import f\n", b="from skyrl.a import f\n")
    assert read_target(root, "skyrl.a", "f") is None


def test_a_source_that_is_not_utf8_is_drift_and_no_other_exception(tmp_path: Path) -> None:
    folder = fake_skyrl.build(tmp_path)
    file = folder.joinpath("skyrl", *UTILS.split(".")[1:]).with_suffix(".py")
    file.write_bytes(b"# \xe9\n" + file.read_bytes())
    ran = run(
        """
        import skyrl_r3
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = type(raised).__name__
        report(error=error, rows=len(skyrl_r3.status()))
        """,
        path=[folder],
    )
    assert ran.values == {"error": "DriftError", "rows": len(manifest_030().targets)}


def test_a_decorated_class_is_drift(tmp_path: Path) -> None:
    """Decorated by ``ray.remote`` or the like, the name is no longer the class whose attribute can be replaced."""
    folder = fake_skyrl.build(tmp_path)
    file = folder.joinpath("skyrl", *SERVER.split(".")[1:]).with_suffix(".py")
    text = file.read_text().replace("class VLLM", "def remote(cls):\n    return object()\n@remote\nclass VLLM")
    file.write_text(text)
    ran = run(
        f"""
        import {PREPROCESS}, {SERVER}, skyrl_r3
        try:
            skyrl_r3.enable()
            error = None
        except Exception as raised:
            error = type(raised).__name__
        report(error=error, patched=patched({P}))
        """,
        path=[folder],
    )
    assert ran.values == {"error": "DriftError", "patched": False}
