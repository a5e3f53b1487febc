"""A double of SkyRL: a package named ``skyrl`` with nothing in it but the targets of a manifest.

It stands for an installed SkyRL wherever a test is about order, drift or version, which the real one, with one
release and imports of many seconds, cannot show. It has the real module names, attribute names and signatures, taken
from ``patches/``, and none of the behaviour: every function returns ``{"stock": <its dotted name>}``.
That the manifests themselves are true of the real SkyRL is what ``manifest_suite.py`` checks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from skyrl_r3.manifest import Manifest, Target, manifests

SERVER = "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"
CLIENT = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
GENERATOR = "skyrl.train.generators.skyrl_gym_generator"
UTILS = "skyrl.train.utils.trainer_utils"
PREPROCESS = "skyrl.train.dataset.preprocess"
TRAINER = "skyrl.train.trainer"

CONVERT = "convert_prompts_responses_to_batch_tensors"

MAIN_BLOCK = """
if __name__ == "__main__":
    main()
"""


def manifest_030() -> Manifest:
    """The manifest that was written for SkyRL 0.3.0."""
    return manifest_of("0.3.0")


def manifest_of(release: str) -> Manifest:
    """The manifest that was written for ``release``."""
    (found,) = [manifest for manifest in manifests() if manifest.reviewed == release]
    return found


CONSTANT = re.compile(r"=([A-Z_]{2,})")
CLASS_DECORATOR = re.compile(r"in (@\S+): ")


def build(
    folder: Path,
    *,
    like: str = "0.3.0",
    version: str | None = "as the release",
    omit: Collection[str] = (),
    signatures: Mapping[str, str] | None = None,
    top: Mapping[str, str] | None = None,
    bottom: Mapping[str, str] | None = None,
) -> Path:
    """Write the package into ``folder``, and return ``folder`` to be put on the path.

    Args:
        like: The release whose targets it has.
        version: Its ``__version__``, that release if not given; None for a package that does not say.
        omit: Names of modules or targets to leave out.
        signatures: By target name, a signature other than the manifest's.
        top: By module, statements that come after its ``from __future__`` line.
        bottom: By module, statements that come last.
    """
    package = folder / "skyrl"
    package.mkdir(parents=True)
    said = {"as the release": f'__version__ = "{like}"\n', None: ""}.get(version, f'__version__ = "{version}"\n')
    (package / "__init__.py").write_text(said)
    targets = manifest_of(like).targets
    for module in dict.fromkeys(target.module for target in targets):
        if module in omit:
            continue
        path = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
        parts = [f'"""Stands in for {module}."""', "from __future__ import annotations", (top or {}).get(module, "")]
        rows = [target for target in targets if target.module == module and target.name not in omit]
        parts += [f"{name} = ()" for row in rows for name in CONSTANT.findall(row.signature)]
        homes = {target.attribute: _home(target, targets) for target in rows}
        parts += [f"from {homes[row.attribute]} import {row.attribute}" for row in rows if _is_imported(row, homes)]
        for class_name in dict.fromkeys(_class_name(row) for row in rows if not _is_imported(row, homes)):
            indent = "    " if class_name else ""
            if class_name:
                wrapped = [row.signature for row in rows if _class_name(row) == class_name]
                parts += ["from dataclasses import dataclass", *CLASS_DECORATOR.findall(wrapped[0])]
                parts += [f"class {class_name}:"]
            for row in rows:
                if _class_name(row) == class_name and not _is_imported(row, homes):
                    parts += _function(row, (signatures or {}).get(row.name, row.signature), indent)
        parts.append((bottom or {}).get(module, ""))
        path.write_text("\n".join(parts) + "\n")
    return folder


def _home(target: Target, targets: Collection[Target]) -> str:
    """The module that defines the function: the first with a target of the same name and source."""
    return next(t.module for t in targets if (t.attribute, t.sha256) == (target.attribute, target.sha256))


def _is_imported(target: Target, homes: Mapping[str, str]) -> bool:
    return homes[target.attribute] != target.module


def _class_name(target: Target) -> str:
    return target.attribute.rpartition(".")[0]


def _function(target: Target, signature: str, indent: str) -> list[str]:
    match = re.fullmatch(r"(@\S+ )?(async )?(\(.*\))", CLASS_DECORATOR.sub("", signature))
    assert match, f"cannot read the signature {signature!r}"
    decorator, prefix, parameters = match.groups(default="")
    name = target.attribute.rpartition(".")[2]
    lines = [decorator.strip()] if decorator else []
    lines += [f"{prefix}def {name}{parameters}:", f"    return {{'stock': {target.name!r}}}"]
    return [indent + line for line in lines]
