#!/usr/bin/env bash
# Runs SkyRL's own tests of what the overlay touches, without and with it, and compares test by test.
#
#   ci/skyrl_tests.sh CHECKOUT     a checkout of SkyRL at tag skyrl-v0.3.0; nothing of it is copied into this repository
#
# Status 1 if a test that passes without the overlay does not pass with it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
checkout="$(cd "${1:?usage: ci/skyrl_tests.sh CHECKOUT}" && pwd)"
export HF_HUB_OFFLINE=1

source "$here/env.sh"
work="$(mktemp -d /tmp/r3-skyrl-tests.XXXXXX)"
trap 'rm -rf "$work"' EXIT
r3_run_env "$work/env"
# The tests alone, away from the checkout's own skyrl package: the installed release is what is patched.
cp -r "$checkout/tests" "$work/tests"
cd "$work"

tests=(tests/train/dataset tests/train/generators tests/train/step_wise tests/train/test_trainer_utils.py
    tests/train/test_trainer.py tests/train/test_generator_postprocess.py tests/train/test_fully_async_trainer.py
    tests/train/test_eval.py tests/train/test_prompt_mini_batch.py tests/backends/skyrl_train/inference_servers
    tests/backends/skyrl_train/test_train_batch.py tests/backends/skyrl_train/workers)
bounded=(timeout --foreground -s ABRT -k 60 3600)

# No `set -e` for these two: some of SkyRL's tests need a GPU or a model hub and fail either way.
SKYRL_R3=off "${bounded[@]}" "$work/env/0.3/bin/python" -m pytest "${tests[@]}" -q -p no:cacheprovider \
    --continue-on-collection-errors --junitxml "$work/without.xml" >"$work/without.log" 2>&1 || true
# The flag is SkyRL's own setting, so that most tests run with it off; the hooks are in place all the same.
"${bounded[@]}" "$work/env/0.3/bin/python" -m pytest "${tests[@]}" -q -p no:cacheprovider \
    --continue-on-collection-errors --junitxml "$work/with.xml" >"$work/with.log" 2>&1 || true

"$work/env/0.3/bin/python" - "$work/without.xml" "$work/with.xml" <<'PY'
import sys
import xml.etree.ElementTree as ElementTree


def passed(path):
    cases = ElementTree.parse(path).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": not len(case.findall("failure") + case.findall("error") + case.findall("skipped")) for case in cases}


without, with_ = map(passed, sys.argv[1:])
lost = sorted(name for name, ok in without.items() if ok and not with_.get(name))
print(f"passed without the overlay: {sum(without.values())} of {len(without)}")
print(f"passed with the overlay:    {sum(with_.values())} of {len(with_)}")
for name in lost:
    print(f"passes only without: {name}")
sys.exit(bool(lost) or not any(without.values()))
PY
