#!/usr/bin/env bash
# One command on a fresh machine: real generation with the overlay off and on, compared bit for bit. No GPU needed.
# Writes a report with pictures to $SKYRL_R3_OUT, or to r3-report/ in the current directory.
# Needs Python 3.12 (or what ci/env.sh can get), about 8 GB of disk for the cached environment, 2 cores, 10 GB of memory.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# /tmp, not $TMPDIR: Ray puts Unix sockets below it, and their paths may have 107 characters.
work="$(mktemp -d /tmp/r3-demo.XXXXXX)"
demo=""
finish() {
    local status=$?
    trap - EXIT INT TERM
    if [ -n "$demo" ] && kill -0 "$demo" 2>/dev/null; then
        kill -TERM "$demo"
        wait "$demo" || true
    fi
    if [ "$status" -eq 0 ]; then
        rm -rf "$work"
    else
        echo "demo: failed (status $status); logs and results are kept in $work" >&2
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "[demo] environments with SkyRL 0.3.0, SkyRL 0.4.0 and vLLM (cached after the first time)"
source "$here/env.sh"
echo "[demo] building and installing this repository's wheel"
r3_run_env "$work/env"
echo "[demo] making a tiny random-weight MoE from a fixed seed"
SKYRL_R3=off HF_HUB_OFFLINE=1 "$work/env/0.3/bin/python" "$here/tiny_moe.py" "$work/model" 2>"$work/model.log" ||
    { cat "$work/model.log" >&2; exit 1; }

# In the background and waited for, so that the traps run at once.
"$work/env/0.3/bin/python" "$here/demo.py" --work "$work" --model "$work/model" \
    --python-04 "$work/env/0.4/bin/python" --router "$SKYRL_R3_ENV/bin/vllm-router" \
    --report "${SKYRL_R3_OUT:-$PWD/r3-report}" &
demo=$!
wait "$demo"
