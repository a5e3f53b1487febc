"""The routers of a model of transformers: what they chose, and making them choose what was captured.

Nothing here knows a family of models. In transformers 5.8 each layer with experts calls a module of that name with the
ids of each token's experts, and has chosen them by one ``topk`` over all experts; its way to weigh them stays in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_r3.spec import RouteSpec

_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d+)\.\w+\.experts")
_TOPK = (torch.topk, torch.Tensor.topk)


def experts(network: Any, spec: RouteSpec) -> dict[int, tuple[Any, Any]]:
    """Layer -> the block that routes, and its experts.

    Raises:
        ValueError: Other layers have experts than ``spec`` says.
    """
    found = {
        int(match[1]): (network.get_submodule(name.removesuffix(".experts")), module)
        for name, module in network.named_modules()
        if (match := _EXPERTS.fullmatch(name))
    }
    if tuple(sorted(found)) != spec.moe_layers:
        raise ValueError(f"layers with experts: expected {spec.moe_layers}, got {tuple(sorted(found))}")
    return found


@contextmanager
def recorded(network: Any, spec: RouteSpec) -> Iterator[dict[int, list[torch.Tensor]]]:
    """While this lasts, keep the ids that the experts are called with: layer -> of each call, ``[tokens, topk]``."""
    calls: dict[int, list[torch.Tensor]] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = [each for each in (*args, *kwargs.values()) if not each.is_floating_point()]
            if len(ids) != 1 or ids[0].shape[-1] != spec.topk:
                got = [list(each.shape) for each in ids]
                raise ValueError(f"experts of layer {layer}: expected one tensor [tokens, {spec.topk}], got {got}")
            calls.setdefault(layer, []).append(ids[0].detach().clone())

        return hook

    with ExitStack() as stack:
        for layer, (_, module) in experts(network, spec).items():
            stack.callback(module.register_forward_pre_hook(keep(layer), with_kwargs=True).remove)
        yield calls


def table(calls: dict[int, list[torch.Tensor]], spec: RouteSpec) -> torch.Tensor:
    """What was :func:`recorded`, int64 ``[tokens, layers, topk]`` on the CPU. Layers without experts are all zero."""
    joined = {layer: torch.cat(parts) for layer, parts in calls.items()}
    rows = {len(ids) for ids in joined.values()}
    if tuple(sorted(joined)) != spec.moe_layers or len(rows) != 1:
        got = {layer: len(ids) for layer, ids in joined.items()}
        raise ValueError(f"rows of layers {spec.moe_layers}: expected as many of each, got {got}")
    routes = torch.zeros(rows.pop(), spec.layers or 0, spec.topk or 0, dtype=torch.int64)
    for layer, ids in joined.items():
        routes[:, layer] = ids.cpu()
    return routes


@contextmanager
def forced(network: Any, spec: RouteSpec, routes: torch.Tensor) -> Iterator[None]:
    """While this lasts, one forward pass takes the experts that ``routes`` says.

    Args:
        network: The model, on the device of ``routes``.
        spec: Of its routes.
        routes: int64 ``[rows, layers, topk]``, for the first tokens of the pass. Those behind them choose themselves.

    Raises:
        ValueError: Other routes than that, an id twice for a token, fewer tokens than rows, or a layer that did not
            choose once.
    """
    if routes.ndim != 3 or tuple(routes.shape[1:]) != (spec.layers, spec.topk):
        raise ValueError(f"routes: expected [rows, {spec.layers}, {spec.topk}], got {list(routes.shape)}")
    for layer in spec.moe_layers or ():
        ids = routes[:, layer].sort().values
        wrong = (ids[:, 1:] == ids[:, :-1]).any(-1) | (ids[:, 0] < 0) | (ids[:, -1] >= (spec.num_experts or 0))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            expected = f"{spec.topk} ids below {spec.num_experts}, each once"
            raise ValueError(
                f"routes: expected {expected}, got {routes[row, layer].tolist()}, row {row}, layer {layer}"
            )
    choices = _Forced(spec, routes)
    with ExitStack() as stack:
        for layer, (block, _) in experts(network, spec).items():
            stack.callback(block.register_forward_pre_hook(choices.enter(layer)).remove)
            stack.callback(block.register_forward_hook(choices.leave, always_call=True).remove)
        with choices:
            yield
    asked = {layer: choices.asked.count(layer) for layer in spec.moe_layers or ()}
    if set(asked.values()) != {1}:
        raise ValueError(f"choices of experts: expected one in each of the layers {spec.moe_layers}, got {asked}")


class _Forced(TorchFunctionMode):
    """Answers the ``topk`` over all experts with the forced ids, and the scores that were given for these."""

    def __init__(self, spec: RouteSpec, routes: torch.Tensor) -> None:
        super().__init__()
        self.spec, self.routes = spec, routes
        self.layer: int | None = None
        self.asked: list[int] = []

    def enter(self, layer: int) -> Any:
        def hook(*_: Any) -> None:
            self.layer = layer

        return hook

    def leave(self, *_: Any) -> None:
        self.layer = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if self.layer is None or func not in _TOPK:
            return answer
        scores = args[0] if args else (kwargs or {})["input"]
        # DeepSeek's choice of groups is a topk too, over fewer.
        if scores.shape[-1] != self.spec.num_experts or answer.indices.shape[-1] != self.spec.topk:
            return answer
        self.asked.append(self.layer)
        own = answer.indices.reshape(-1, self.spec.topk)
        if len(own) < len(self.routes):
            raise ValueError(f"tokens: expected at least {len(self.routes)}, the routes' rows, got {len(own)}")
        ids = torch.cat([self.routes[:, self.layer], own[len(self.routes) :]]).reshape(answer.indices.shape)
        return torch.return_types.topk((scores.gather(-1, ids), ids))
