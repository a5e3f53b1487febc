#!/usr/bin/env bash
# Runs the parts of the contract suite that are for every implementation against skyrl-r3 and SkyRL 0.4.0, and the
# named test of every planted bug, and writes contract_tests/REPORT.md.
#
#   ci/contract_report.sh             in the profile ci
#   ci/contract_report.sh nightly     with other examples each time, and 10 to 50 times as many
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
profile="${1:-ci}"

source "$here/env.sh"
work="$(mktemp -d /tmp/r3-report.XXXXXX)"
trap 'rm -rf "$work"' EXIT
r3_run_env "$work/env"
python="$work/env/0.4/bin/python"

cp contract_tests/reports/head.md "$work/REPORT.md"
for impl in overlay skyrl; do
    "$python" -m pytest contract_tests/codec contract_tests/http --impl "$impl" --hypothesis-profile "$profile" -q \
        --report "$work/$impl.json" -p no:cacheprovider --disable-warnings -o faulthandler_timeout=3600
done
{
    "$python" -m contract_tests.report "$work/overlay.json" "$work/skyrl.json"
    printf '\n## Planted bugs\n\nEach is an implementation with one fault. The named test catches it, in the profile ci.\n\n'
    "$python" -m contract_tests.planted
} >>"$work/REPORT.md"
cp "$work/REPORT.md" contract_tests/REPORT.md
cp "$work/overlay.json" "$work/skyrl.json" contract_tests/reports/
