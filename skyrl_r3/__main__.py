"""``python -m skyrl_r3``, and what the command ``skyrl-r3`` starts with."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Without one of its libraries, which ``pip install --no-deps`` leaves out, say which."""
    try:
        from skyrl_r3.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        sys.exit(f"skyrl-r3 needs the package {error.name}, which is not installed: pip install {error.name}")
    app(prog_name="skyrl-r3")


if __name__ == "__main__":
    main()
