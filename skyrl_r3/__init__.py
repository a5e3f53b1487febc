"""skyrl-r3: routed experts from rollout to training in SkyRL, as packed and checked arrays.

Installed beside SkyRL, and switched on by SkyRL's own ``generator.inference_engine.enable_return_routed_experts``.
Importing this package imports nothing else: it happens at every start of the interpreter.
"""

# `typing` alone would take longer to import than this package may take at start-up (1 ms).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from skyrl_r3 import metrics
    from skyrl_r3.overlay import TargetStatus, disable, enable, status
    from skyrl_r3.routes import RoutedExperts

__version__ = "0.2.0"
__all__ = ["RoutedExperts", "TargetStatus", "__version__", "disable", "enable", "metrics", "status"]

_HOMES = {
    "RoutedExperts": "skyrl_r3.routes",
    "TargetStatus": "skyrl_r3.overlay",
    "disable": "skyrl_r3.overlay",
    "enable": "skyrl_r3.overlay",
    "status": "skyrl_r3.overlay",
}


def __getattr__(name: "str") -> "Any":
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    if name == "metrics":
        from importlib import import_module

        return import_module("skyrl_r3.metrics")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
