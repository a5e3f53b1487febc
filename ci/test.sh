#!/usr/bin/env bash
# Lint, types, the contract tests against real SkyRL, then the demo. Sets up what it needs. CPU only.
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
step() { echo; echo "== $* (at $SECONDS s)"; }

step "ruff"
"$SKYRL_R3_ENV/bin/ruff" check .
"$SKYRL_R3_ENV/bin/ruff" format --check .
step "pyright"
"$SKYRL_R3_ENV/bin/pyright" --pythonpath "$python"
step "contract suite in an environment with nothing but what its codec part needs"
"$SKYRL_R3_UV" venv -q --python "$SKYRL_R3_PY" "$work/bare"
# In the releases of the other environments.
grep -E '^(pytest|hypothesis|numpy|orjson|pybase64)(\[|=)' "$here/requirements-skyrl-0.3.txt" | sed 's/\[[a-z]*\]//' \
    >"$work/bare.txt"
"$SKYRL_R3_UV" pip install -q --python "$work/bare/bin/python" -r "$work/bare.txt"
for impl in overlay naive; do
    "$work/bare/bin/python" -m pytest contract_tests --impl "$impl" "${quietly[@]}"
done
step "contract suite, SkyRL 0.3"
"$python" -m pytest contract_tests/codec contract_tests/http contract_tests/overlay "${quietly[@]}"
step "contract suite, SkyRL 0.4"
"$SKYRL_R3_PYTHON_04" -m pytest contract_tests/codec contract_tests/http contract_tests/overlay/skyrl_0_4 "${quietly[@]}"
step "contract suite on SkyRL 0.4.0 itself"
"$SKYRL_R3_PYTHON_04" -m pytest contract_tests --impl skyrl "${quietly[@]}"
step "demo"
bash "$here/demo.sh"
step "done"
