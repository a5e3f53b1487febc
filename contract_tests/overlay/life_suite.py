"""What the suites of the overlay's life have in common: a double that remembers what it was, and how to run lives."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from contract_tests.child import REPO, run_python
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.line import LineContract
from skyrl_r3.manifest import Manifest, Target

PEER = Path(__file__).with_name("life_peer.py")
Step = Sequence[str]

# The last statements of a module of the double. By `globals()`, because the overlay reads statements that bind names.
MEMORY = """
import inspect, os, sys, types
HOMES = {homes!r}
STOCK = {{}}
def fixed(where):
    if os.environ.get("FIXED") == where:
        raise AttributeError(f"{{where}} is fixed")
class Module(types.ModuleType):
    def __setattr__(self, name, value):
        fixed(f"{{__name__}}.{{name}}")
        super().__setattr__(name, value)
class Meta(type):
    def __setattr__(self, name, value):
        fixed(f"{{__name__}}.{{self.__qualname__}}.{{name}}")
        super().__setattr__(name, value)
for attribute in {defined!r}:
    *classes, name = attribute.split(".")
    for owner in classes:
        content = {{k: v for k, v in vars(globals()[owner]).items() if k not in ("__dict__", "__weakref__")}}
        made = globals()[owner]
        globals()[owner] = made if isinstance(made, Meta) else Meta(owner, (), content)
    STOCK[attribute] = inspect.getattr_static(globals()[classes[0]], name) if classes else globals()[name]
sys.modules[__name__].__class__ = Module
"""


manifest_of = cache(fake_skyrl.manifest_of)


class LifeContract(LineContract):
    """Base of the suites that run lives with a line's double."""

    @property
    def manifest(self) -> Manifest:
        """Read once: a model of each of a thousand lives asks for it."""
        return manifest_of(self.release)

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(target.module for target in self.manifest.targets))

    @property
    def halves(self) -> tuple[list[str], list[str]]:
        """The modules, every other one: neither half is all of one side of SkyRL."""
        return self.modules[::2], self.modules[1::2]

    def home(self, target: Target) -> str:
        """The module that defines the target's function."""
        kept = (target.attribute, target.sha256)
        return next(row.module for row in self.manifest.targets if (row.attribute, row.sha256) == kept)

    def needs(self, module: str) -> set[str]:
        """The modules that are imported with ``module``, itself included."""
        return {module} | {self.home(row) for row in self.manifest.targets if row.module == module}

    def build(self, folder: Path, **change: Any) -> Path:
        """A double of the line's SkyRL, changed as :func:`fake_skyrl.build` does it."""
        gone = set(change.get("omit", ()))
        bottom = {}
        for module in self.modules:
            rows = [row for row in self.manifest.targets if row.module == module and row.name not in gone]
            homes = {row.attribute: self.home(row) for row in rows}
            defined = [attribute for attribute, home in homes.items() if home == module]
            bottom[module] = MEMORY.format(homes=homes, defined=defined)
        return fake_skyrl.build(folder, like=self.release, bottom=bottom, **change)

    def live(
        self, folder: Path, lives: Sequence[tuple[Path, Sequence[Step]]], env: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Run each life, a double and its steps, in a process of its own; ``folder`` is for what they are told."""
        told = folder / "lives.json"
        told.write_text(json.dumps([{"double": str(double), "steps": steps} for double, steps in lives]))
        seen = run_python([sys.executable, str(PEER), str(told)], path=[REPO], env=env).values
        assert isinstance(seen, list)
        assert len(seen) == len(lives)
        return seen
