"""Compare SkyRL's functions with those that a manifest of ``patches/`` was written for: same, changed or gone.

In the root of a checkout, with the interpreter of SkyRL's environment:

    python -m ci.anchors                                  the installed SkyRL
    python -m ci.anchors --skyrl NEW/skyrl                sources that are not installed
    python -m ci.anchors --skyrl NEW/skyrl --against OLD/skyrl    with what changed in each function
    python -m ci.anchors --skyrl NEW/skyrl --toml         the manifest with the signatures and hashes that were found

Exit status: 0 if all are the same, 1 if not, 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import signal
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from packaging.version import Version

from skyrl_r3.errors import OverlayError
from skyrl_r3.manifest import Manifest, Plan, Target, installed_skyrl, read_manifest
from skyrl_r3.sources import Found, assigned_string, read_target

REPO = Path(__file__).parent.parent
SHOWN = 5
"""Places that are named where a function may have gone to. Names like ``generate`` are everywhere."""

TOO_DEEP = (RecursionError, MemoryError)
"""What Python raises for sources that are nested too deep."""


def compare(version: str, root: Path, manifest: Manifest) -> Plan:
    """What the SkyRL in ``root`` has for each target, whatever release ``manifest`` is for."""
    found = {target.name: read_target(root, target.module, target.attribute) for target in manifest.targets}
    return Plan(version=version, manifest=manifest, found=found)


def state(plan: Plan, target: Target) -> str:
    """``same``, ``changed`` or ``gone``."""
    if plan.found[target.name] is None:
        return "gone"
    return "changed" if plan.edited(target) or target in plan.drifted() else "same"


def report(plan: Plan, root: Path, old: tuple[str, Path] | None = None) -> Iterator[str]:
    """The lines to read, by module; with ``old``, version and folder of another release, what changed since that."""
    before = None if old is None else compare(*old, plan.manifest)
    module = ""
    for target in plan.manifest.targets:
        if target.module != module:
            module = target.module
            yield from ("", module)
        found, places = plan.found[target.name], []
        yield f"  {state(plan, target):8} {target.attribute}"
        if found is None:
            places = sorted(homes(root, target.attribute), key=lambda home: home[0] != target.module)
            yield from _places(places)
        elif found.signature != target.signature:
            yield from marked(target.signature, found.signature)
        elif found.sha256 != target.sha256:
            yield f"{'':11}its source, not its signature: sha256 {found.sha256}"
        if old is not None and before is not None and state(plan, target) != "same":
            if len(places) == 1:  # Or it might be compared with another function of that name.
                found = read_target(root, *places[0][:2])
            texts = [there.text.splitlines() if there else [] for there in (before.found[target.name], found)]
            yield from difflib.unified_diff(texts[0], texts[1], str(old[1]), str(root), lineterm="")
    yield from ("", summary(plan))


def summary(plan: Plan) -> str:
    """How many of each, and what to do next."""
    states = [state(plan, target) for target in plan.manifest.targets]
    counts = ", ".join(f"{states.count(kind)} {kind}" for kind in ("same", "changed", "gone"))
    if not plan.manifest.is_for(plan.version):
        next_step = "with no other manifest, the overlay leaves this SkyRL alone: see CONTRIBUTING.md"
    elif plan.drifted():
        next_step = f"the overlay refuses this SkyRL, as {len(plan.drifted())} of them do not fit their patches"
    elif states.count("changed"):
        next_step = "the overlay takes this SkyRL, as every signature fits; --against OLD/skyrl shows what changed"
    else:
        next_step = "nothing to do"
    return f"{counts} of {len(states)} targets: {next_step}"


def marked(expected: str, found: str) -> Iterator[str]:
    """Two signatures, with the words that only one of them has marked as ``[-gone-]`` and ``{+new+}``."""
    words = expected.split(" "), found.split(" ")
    # The bracket or comma at a word's end does not make it another parameter.
    bare = [[re.sub(r"^[(]|[,)]$", "", word) for word in line] for line in words]
    lines: tuple[list[str], list[str]] = ([], [])
    for kind, *ends in difflib.SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
        for line, side, (start, end), marks in zip(lines, words, (ends[:2], ends[2:]), ("[--]", "{++}"), strict=True):
            if text := " ".join(side[start:end]):
                line.append(text if kind == "equal" else f"{marks[:2]}{text}{marks[2:]}")
    for name, line in zip(("expected", "found"), lines, strict=True):
        yield f"{'':11}{name:9}{' '.join(line)}"


def homes(root: Path, attribute: str) -> Iterator[tuple[str, str, int]]:
    """Module, dotted name and line of each function of SkyRL's that has the last name of ``attribute``."""
    name = attribute.rpartition(".")[2]
    for path in sorted(path for path in root.rglob("*.py") if path.is_file()):
        # What Python itself could not read.
        with suppress(SyntaxError, UnicodeDecodeError, *TOO_DEEP), tokenize.open(path) as file:
            if name in (text := file.read()):
                module = ".".join(("skyrl", *path.relative_to(root).with_suffix("").parts))
                yield from ((module, dotted, line) for dotted, line in _functions(ast.parse(text).body, name))


def _functions(body: Sequence[ast.stmt], name: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, name, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            yield prefix + name, node.lineno


def _places(places: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    if not places:
        yield f"{'':11}no function of that name is left"
    for module, dotted, line in places[:SHOWN]:
        yield f"{'':11}of that name: {module}:{line} {dotted}"
    if len(places) > SHOWN:
        yield f"{'':11}and {len(places) - SHOWN} more"


def renewed(text: str, plan: Plan) -> str:
    """``text`` of a manifest for the SkyRL that was found, with its signatures and hashes.

    What is gone keeps its row, under a comment that says so, and the overlay goes on refusing.
    """
    lines, targets = [], iter(plan.manifest.targets)
    found: Found | None = None
    for line in text.splitlines():
        key = line.partition(" = ")[0]
        if line == "[[target]]":
            target = next(targets)
            found = plan.found[target.name]
            if found is None:
                lines.append(f"# Gone in SkyRL {plan.version}: {target.attribute}")
        elif found is not None and key in ("signature", "sha256"):
            line = f"{key} = {json.dumps(getattr(found, key))}"
        elif key == "reviewed":
            line = f'reviewed = "{plan.version}"'
        elif key == "skyrl" and not plan.manifest.is_for(plan.version):
            release = Version(plan.version)
            line = f'skyrl = ">={release.public},<{release.major}.{release.minor + 1}"'
        lines.append(line)
    return "\n".join(lines) + "\n"


def skyrl_in(folder: Path) -> tuple[str, Path]:
    """Version and folder of a SkyRL that need not be installed.

    Raises:
        ValueError: It is none.
    """
    version = assigned_string(folder / "__init__.py", "__version__")
    if version is None:
        wanted = "SkyRL's package folder, which is skyrl/ in a checkout or an unpacked wheel"
        raise ValueError(f"expected {wanted}, got {'no __version__ in ' if folder.is_dir() else 'no folder '}{folder}")
    return version, folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skyrl", type=Path, metavar="FOLDER", help="SkyRL's package folder [the installed one]")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="that of the release to show changes from")
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="a manifest [the release's, or else the newest]")
    parser.add_argument("--toml", action="store_true", help="print the manifest as it would be for this SkyRL")
    options = parser.parse_args(arguments)
    try:
        version, root = skyrl_in(options.skyrl) if options.skyrl else installed_skyrl()
        old = skyrl_in(options.against) if options.against else None
    except (ValueError, OSError, OverlayError, *TOO_DEEP) as error:
        parser.error(str(error))
    paths = [options.manifest] if options.manifest else sorted((REPO / "patches").glob("skyrl-*.toml"))
    try:
        read = {path: read_manifest(path) for path in paths}
        newest = max(read, key=lambda path: Version(read[path].reviewed))
        path = next((path for path, manifest in read.items() if manifest.is_for(version)), newest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"no manifest: {error!r}")
    lines = [f"SkyRL {version} in {root}", f"against {path.name}, reviewed with SkyRL {read[path].reviewed}"]
    if not read[path].is_for(version):
        none = "It is not" if options.manifest else "No manifest is"
        lines.append(f"{none} for this release: {path.name} is for {read[path].skyrl}.")
    try:
        plan = compare(version, root, read[path])
        if options.toml:
            lines = renewed(path.read_text(encoding="utf-8"), plan).splitlines()
        else:
            lines += report(plan, root, old)
    except (OSError, ValueError, *TOO_DEEP) as error:
        parser.error(f"SkyRL {version} in {root} cannot be compared: {error!r}")
    print(*lines, sep="\n")
    return 0 if all(state(plan, target) == "same" for target in plan.manifest.targets) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As head ends what writes to it.
    raise SystemExit(main())
