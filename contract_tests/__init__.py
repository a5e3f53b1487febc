import sys

# Whoever runs this in a checkout may have any Python.
if sys.version_info < (3, 12):  # noqa: UP036
    raise SystemExit("contract_tests needs Python 3.12 or newer, this is " + sys.version.split()[0])
