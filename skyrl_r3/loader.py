"""The loader that patches a module of SkyRL right after it is executed. Imported with the first such module."""

from __future__ import annotations

import ast
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from skyrl_r3 import overlay

__all__ = ["PatchingLoader", "patching_spec"]

_HOOK = '__import__("skyrl_r3.overlay").overlay.script_loaded(globals(), {name!r})'


def patching_spec(finder: object, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """The spec that the finders other than ``finder`` have for ``name``, loading it patched; None if not wanted."""
    if not overlay.wanted(name):
        return None
    for other in sys.meta_path:
        # By its name: a reload of skyrl_r3.autoload makes another finder, and two would ask each other for ever.
        ours = type(other).__name__ == type(finder).__name__
        find_spec = None if ours else getattr(other, "find_spec", None)
        spec = find_spec(name, path, target) if find_spec else None
        if spec is not None:
            if spec.loader is not None:
                spec.loader = PatchingLoader(spec.loader, name)
            return spec
    return None


class PatchingLoader(Loader):
    """A loader around SkyRL's own: everything is delegated, and the loaded module is patched."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_inner":  # A copy asks for attributes before it has any.
            raise AttributeError(attribute)
        return getattr(self._inner, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the wrapped loader's."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute ``module``, then patch it."""
        self._inner.exec_module(module)
        overlay.module_loaded(module, self._name)

    def get_code(self, name: str) -> CodeType | None:
        """Code for ``python -m``, which runs a module as ``__main__`` and never calls :meth:`exec_module`.

        SkyRL's server is started so. Its main block comes last and runs until the server stops, so that the patching
        statement goes in front of it.
        """
        source = self._inner.get_source(name)
        if source is None:
            return self._inner.get_code(name)
        tree = ast.parse(source)
        main = next((i for i, node in enumerate(tree.body) if _is_main_block(node)), len(tree.body))
        tree.body[main:main] = ast.parse(_HOOK.format(name=name)).body
        return compile(tree, self._inner.get_filename(name), "exec", dont_inherit=True)


def _is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
