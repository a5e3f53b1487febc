"""skyrl-r3: routed experts from rollout to training in SkyRL, as packed and checked arrays.

Installed beside SkyRL, and switched on by SkyRL's own ``generator.inference_engine.enable_return_routed_experts``.
Importing this package imports nothing else: it happens at every start of the interpreter.
"""

# `typing` alone would take longer to import than this package may take at start-up (1 ms).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from skyrl_r3 import batch, codec, errors, frame, metrics, reply
    from skyrl_r3.overlay import TargetStatus, disable, enable, status
    from skyrl_r3.routes import RoutedExperts

__version__ = "0.3.0"
__all__ = [
    "RoutedExperts",
    "TargetStatus",
    "__version__",
    "batch",
    "codec",
    "disable",
    "enable",
    "errors",
    "frame",
    "metrics",
    "reply",
    "status",
]

_HOMES = {
    "RoutedExperts": "routes",
    "TargetStatus": "overlay",
    "disable": "overlay",
    "enable": "overlay",
    "status": "overlay",
}


def __getattr__(name: "str") -> "Any":
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"skyrl_r3.{_HOMES.get(name, name)}")
    return getattr(module, name) if name in _HOMES else module
