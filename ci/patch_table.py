"""Print README's table of patches, made from ``patches/``; with ``--write``, put it into README.md."""

from __future__ import annotations

import sys
from pathlib import Path

from skyrl_r3.manifest import manifests

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- patches: made by ci/patch_table.py -->\n", "<!-- /patches -->"


def table() -> str:
    """The table as Markdown, a row for each target."""
    lines = []
    for manifest in manifests():
        lines += [f"SkyRL {manifest.skyrl}, reviewed against {manifest.reviewed}:", ""]
        lines += ["| in SkyRL | what the overlay does there | why |", "|---|---|---|"]
        lines += [
            f"| `{target.module.removeprefix('skyrl.')}`<br>`{target.attribute}` | {target.what} | {target.why} |"
            for target in manifest.targets
        ]
        lines.append("")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """``text`` of the README with the table between its markers."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + rest[rest.index(END) :]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
