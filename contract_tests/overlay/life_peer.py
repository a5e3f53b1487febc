"""Runs many processes through steps of the overlay's life, and says what became of SkyRL in each.

``life_peer.py FILE``, where FILE holds a list of lives in JSON: ``double``, a folder with the double of SkyRL (one
that :func:`life_suite.build` made), and ``steps``. Every life is a fork of this process, which has imported everything
but SkyRL, so that thousands of lives are affordable and none knows of another.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import skyrl_r3
from skyrl_r3 import autoload, manifest, overlay

OURS = str(Path(skyrl_r3.__file__).parent)
LONGEST_S = 60


class Life:
    """One process. A step is a list: the name of a method, and its arguments."""

    def __init__(self) -> None:
        self.theirs: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.factories: dict[tuple[Any, str], Any] = {}
        self.heard: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.heard.append(record.getMessage())
        logging.getLogger("skyrl_r3").addHandler(handler)

    def run(self, steps: list[list[str]]) -> dict[str, Any]:
        """What each step but ``look`` returned or raised, and what there was at each ``look`` and at the end."""
        events: list[Any] = []
        looks: list[dict[str, Any]] = []
        for verb, *arguments in steps:
            if verb == "look":
                looks.append(self.look())
                continue
            try:
                events.append(getattr(self, f"do_{verb}")(*arguments))
            except Exception as error:
                events.append({"error": type(error).__name__, "field": getattr(error, "field", str(error))})
        return {"events": events, "looks": [*looks, self.look()], "heard": self.heard}

    # The overlay's verbs

    def do_start(self) -> None:
        """What the wheel's ``.pth`` file does."""
        autoload.start()

    def do_enable(self) -> dict[str, str]:
        return {row.target: row.state for row in skyrl_r3.enable()}

    def do_disable(self) -> dict[str, str]:
        return {row.target: row.state for row in skyrl_r3.disable()}

    def do_import(self, *modules: str) -> list[str]:
        """The modules that could not be imported, as without the overlay."""
        failed = []
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
                failed.append(module)
        return failed

    # Faults

    def do_break_factory(self, module: str, attribute: str) -> None:
        """Have the hook's factory raise for one function of SkyRL's."""
        (target,) = [row for row in _targets() if (row.module, row.attribute) == (module, attribute)]
        home, _, name = target.replacement.partition(":")
        hooks = importlib.import_module(home)
        real = self.factories[hooks, name] = getattr(hooks, name)

        def factory(original: Any) -> Any:
            if original.__qualname__ == attribute:
                raise RuntimeError("broken on purpose")
            return real(original)

        setattr(hooks, name, factory)

    def do_break_attribute(self, module: str, attribute: str) -> None:
        """Have the double refuse to let one attribute be set."""
        os.environ["FIXED"] = f"{module}.{attribute}"

    def do_mend(self) -> None:
        os.environ.pop("FIXED", None)
        for (hooks, name), real in self.factories.items():
            setattr(hooks, name, real)

    # Somebody else who patches

    def do_wrap(self, module: str, attribute: str) -> None:
        """Put a function that calls what it found."""
        found = _raw(module, attribute)
        inner = getattr(found, "__func__", found)

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        self._put(module, attribute, wrapper)

    def do_replace(self, module: str, attribute: str) -> None:
        """Put a function that knows nothing of what it found."""

        def replacement(*_args: Any, **_kwargs: Any) -> None: ...

        self._put(module, attribute, replacement)

    def do_put_back(self, module: str, attribute: str) -> None:
        """Put back what the last of theirs had found."""
        _set(module, attribute, self.kept[f"{module}.{attribute}"])

    def do_put_stock(self, module: str, attribute: str) -> None:
        """Put SkyRL's own function."""
        _set(module, attribute, _stock(module, attribute))

    def _put(self, module: str, attribute: str, function: Any) -> None:
        found = self.kept[f"{module}.{attribute}"] = _raw(module, attribute)
        self.theirs.append(function)
        _set(module, attribute, type(found)(function) if isinstance(found, staticmethod) else function)

    # Looking

    def look(self) -> dict[str, Any]:
        """The state of each target as the overlay tells it, and the functions that are really there."""
        imported = [row for row in _targets() if row.module in sys.modules]
        here = {row.name: _raw(row.module, row.attribute) for row in imported if _has(row.module, row.attribute)}
        return {
            "states": {row.target: row.state for row in skyrl_r3.status()},
            "details": {row.target: row.detail for row in skyrl_r3.status()},
            "functions": {row.name: self._layers(row) for row in imported if row.name in here},
            "same": [[a == b or here[a] is here[b] for b in here] for a in here],
            "finders": [type(finder).__name__ for finder in sys.meta_path].count("SkyRLFinder"),
        }

    def _layers(self, target: manifest.Target) -> list[str]:
        """What is there, from the outside in: ``theirs``, ``ours``, ``guard`` and ``stock``.

        A descriptor counts as SkyRL's own only if it is the very object that SkyRL made.
        """
        value, stock, layers = _raw(target.module, target.attribute), _stock(target.module, target.attribute), []
        if value is stock:
            return ["stock"]
        function = getattr(value, "__func__", value)
        if function is getattr(stock, "__func__", stock):
            return ["copy of stock"]
        while function is not None:
            layers.append(self._kind(function, getattr(stock, "__func__", stock)))
            function = getattr(function, "__wrapped__", None)
        return layers

    def _kind(self, function: Any, stock: Any) -> str:
        if function is stock:
            return "stock"
        if any(function is one for one in self.theirs):
            return "theirs"
        code = function.__code__
        if code.co_filename.startswith(OURS):
            return "guard" if code.co_filename.endswith("refuse.py") else "ours"
        return "unknown"


def _targets() -> tuple[manifest.Target, ...]:
    return manifest.plan().manifest.targets


def _owner(module: str, attribute: str) -> tuple[Any, str]:
    *classes, name = attribute.split(".")
    return functools.reduce(getattr, classes, sys.modules[module]), name


def _raw(module: str, attribute: str) -> Any:
    return inspect.getattr_static(*_owner(module, attribute))


def _has(module: str, attribute: str) -> bool:
    try:
        _raw(module, attribute)
    except AttributeError:
        return False
    return True


def _set(module: str, attribute: str, value: Any) -> None:
    owner, name = _owner(module, attribute)
    setattr(owner, name, value)


def _stock(module: str, attribute: str) -> Any:
    """What the double's module had there before anybody could touch it."""
    vars_of = vars(sys.modules[module])
    home = vars_of["HOMES"].get(attribute, module)
    return vars(sys.modules[home])["STOCK"][attribute]


def _live(life: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, life["double"])
    return Life().run(life["steps"])


def _forked(function: Callable[[Any], Any], argument: Any) -> Any:
    """What ``function`` returns in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(LONGEST_S)  # Nobody waits for ever for a life that hangs.
            os.close(reading)
            with os.fdopen(writing, "w") as answer:
                json.dump(function(argument), answer)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise RuntimeError(f"the life of {argument} ended with status {status}")
    return json.loads(text)


def main() -> None:
    autoload.uninstall()
    logging.getLogger("skyrl_r3").propagate = False  # A life keeps its warnings for itself.
    for line in manifest.manifests():
        for row in line.targets:
            importlib.import_module(row.replacement.partition(":")[0])
    if "skyrl" in sys.modules or overlay.ledger:
        raise RuntimeError("SkyRL is imported already")
    lives = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\nREPORT " + json.dumps([_forked(_live, life) for life in lives]))


if __name__ == "__main__":
    main()
