#!/usr/bin/env bash
# Lint, types, the contract tests against real SkyRL, real generation and replay, then the demo. Sets up what it needs.
# CPU only. Leaves reports with pictures in $SKYRL_R3_OUT, or in r3-report/.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/.."
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

source "$here/env.sh"
work="$(mktemp -d /tmp/r3-test.XXXXXX)"
trap 'rm -rf "$work"' EXIT
# The tests run on the wheel, as users do, not on the checkout: its .pth file has loaded it before pytest starts.
r3_run_env "$work/env"
python="$work/env/0.3/bin/python"
export SKYRL_R3_PYTHON_04="$work/env/0.4/bin/python" SKYRL_R3_ROUTER="$SKYRL_R3_ENV/bin/vllm-router"

quietly=(-q -p no:cacheprovider --disable-warnings)
name="environments" began=0
step() {
    echo "-- $name: $((SECONDS - began)) s"
    name="$*" began=$SECONDS
    printf '\n== %s (at %s s)\n' "$name" "$SECONDS"
}
# A command that hangs is ended after half an hour, and 80 minutes after the start at the latest. $1 is the signal.
bounded() {
    local signal="$1" left_s=$((4800 - SECONDS)); shift
    timeout --foreground -s "$signal" -k 60 $((left_s > 1800 ? 1800 : left_s > 1 ? left_s : 1)) "$@" && return
    echo "status $? after $((SECONDS - began)) s of: $name" >&2
    return 1
}
# On SIGABRT, pytest writes where each thread is.
tests() { bounded ABRT "$1" -m pytest "${@:2}" "${quietly[@]}"; }

step "ruff"
bounded TERM "$SKYRL_R3_ENV/bin/ruff" check .
bounded TERM "$SKYRL_R3_ENV/bin/ruff" format --check .
step "pyright"
bounded TERM "$SKYRL_R3_ENV/bin/pyright" --pythonpath "$python"
# Of the installed wheel: everything that it exports has a declared type.
(cd "$work" && PATH="$work/env/0.3/bin:$PATH" bounded TERM "$SKYRL_R3_ENV/bin/pyright" --pythonpath "$python" \
    --verifytypes skyrl_r3 --ignoreexternal >"$work/types.txt") || { cat "$work/types.txt"; exit 1; }
grep "Type completeness score" "$work/types.txt"
step "SkyRL's functions against patches/"
for each in "$python" "$SKYRL_R3_PYTHON_04"; do
    bounded TERM "$each" -m ci.anchors
done
step "package"
bounded TERM bash "$here/package.sh"
step "contract suite in an environment with nothing but what its codec part needs"
bounded TERM "$SKYRL_R3_UV" venv -q --python "$SKYRL_R3_PY" "$work/bare"
# In the releases of the other environments.
grep -E '^(pytest|hypothesis|numpy|orjson|pybase64)(\[|=)' "$here/requirements-skyrl-0.3.txt" | sed 's/\[[a-z]*\]//' \
    >"$work/bare.txt"
bounded TERM "$SKYRL_R3_UV" pip install -q --python "$work/bare/bin/python" -r "$work/bare.txt"
for impl in overlay naive; do
    tests "$work/bare/bin/python" contract_tests --impl "$impl"
done
step "contract suite, SkyRL 0.3"
tests "$python" contract_tests/codec contract_tests/http contract_tests/overlay
step "contract suite, SkyRL 0.4"
tests "$SKYRL_R3_PYTHON_04" contract_tests/codec contract_tests/http contract_tests/overlay/skyrl_0_4
step "contract suite on SkyRL 0.4.0 itself"
tests "$SKYRL_R3_PYTHON_04" contract_tests --impl skyrl
step "real generation and replay, on a CPU"
out="${SKYRL_R3_OUT:-$PWD/r3-report}"
status=0
tests "$python" gpu_tests --r3-engine vllm --r3-device cpu --r3-report "$work/facts.json" || status=1
bounded TERM "$python" -m gpu_tests.report "$work/facts.json" --out "$out/gpu_tests"
[ "$status" -eq 0 ]
# What needs no GPU is not skipped here.
"$python" -c 'import json, sys
left = [why for why in json.load(open(sys.argv[1]))["not_run"] if "sees no CUDA device" not in why]
sys.exit("\n".join(["not run, though it needs no GPU:", *left]) if left else None)' "$work/facts.json"
step "demo"
bounded TERM bash "$here/demo.sh"
step "done"
