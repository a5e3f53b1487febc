"""README says what the code does."""

from __future__ import annotations

from ci import patch_table


def test_the_table_of_patches_is_that_of_the_manifests() -> None:
    text = patch_table.README.read_text(encoding="utf-8")
    assert text == patch_table.with_table(text), "run: python ci/patch_table.py --write"
    assert text.count("| `train.trainer`") == 2
