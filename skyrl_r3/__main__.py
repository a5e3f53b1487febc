"""``python -m skyrl_r3``, and what the command ``skyrl-r3`` starts with."""

from __future__ import annotations

import sys

from skyrl_r3.lacking import lacking


def main() -> None:
    """Run the command line. If a package that it needs is missing or broken, one line says which."""
    try:
        from skyrl_r3.cli import app

        app(prog_name="skyrl-r3")
    except Exception as error:
        if needed := lacking(error):
            sys.exit(needed)
        raise


if __name__ == "__main__":
    main()
