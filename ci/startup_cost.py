"""What the wheel's ``.pth`` line costs at every start of an interpreter. A measurement, not a test.

    python ci/startup_cost.py WITH WITHOUT [REPEATS]

``WITH`` is the interpreter of an environment that holds the wheel and nothing else, ``WITHOUT`` that of one that holds
nothing; both made by ``python -m venv --without-pip``. Compile the wheel's modules first (``python -m compileall``), as
pip does: without ``.pyc`` files, as under PYTHONDONTWRITEBYTECODE, each start pays for compiling them.

Prints milliseconds: how much longer ``python -c pass`` takes, started in turn with and without, as CPU time of the
process and on the clock, and what ``-X importtime`` says of our modules.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time


def start_ms(python: str) -> tuple[float, float]:
    """CPU time and duration of one start."""
    began = time.perf_counter()
    pid = os.posix_spawn(python, [python, "-c", "pass"], os.environ)
    _, _, usage = os.wait4(pid, 0)
    return (usage.ru_utime + usage.ru_stime) * 1e3, (time.perf_counter() - began) * 1e3


def import_ms(python: str) -> float:
    """Time to import this package's modules, by the interpreter's own account."""
    command = [python, "-X", "importtime", "-c", "pass"]
    report = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.removeprefix("import time:").split("|") for line in report.stderr.splitlines() if "skyrl_r3" in line]
    return sum(int(own) for own, _, _ in rows) / 1e3


def main() -> None:
    """Measure and print."""
    with_wheel, without = sys.argv[1:3]
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    # In turn, so that whatever else the machine does falls on both.
    starts = [(start_ms(with_wheel), start_ms(without)) for _ in range(repeats)]
    for column, name in enumerate(("CPU", "clock")):
        on, off = ([start[side][column] for start in starts] for side in (0, 1))
        median = statistics.median(on) - statistics.median(off)
        print(f"{name}: {median:.2f} ms more (medians of {repeats}), {min(on) - min(off):.2f} ms more (shortest)")
    imports = sorted(import_ms(with_wheel) for _ in range(20))
    print(f"importtime: {statistics.median(imports):.2f} ms (median of 20), {imports[0]:.2f} ms (shortest)")


if __name__ == "__main__":
    main()
