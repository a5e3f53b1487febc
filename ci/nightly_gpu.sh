#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with one GPU and network, and the report of it: report.json and index.html.
#
# Real generation with a real model in vLLM and in transformers, skyrl-r3 bench, and two steps of SkyRL's own training
# where its megatron extra is installed. Each part runs whether or not one before it failed; the status is 1 if one did,
# and the report names it.
#
# Not run so far: no machine with a GPU has seen this script. What was tried of it, on a CPU, is that a missing GPU is
# refused and that parts which fail are reported; that ci/requirements-gpu.txt can be resolved; and that SkyRL 0.3.0
# accepts the settings of the training.
#
# Input, all optional:
#   SKYRL_R3_MODEL         id on the hub or directory of a mixture-of-experts model; the GPU has to hold it
#   SKYRL_R3_PYTHON_GPU    a Python with SkyRL 0.3, vLLM for CUDA and what ci/requirements-gpu.txt has besides, better
#                          with SkyRL's megatron extra; without it, an environment of that list is made and cached
#   SKYRL_R3_PYTHON_04     one with SkyRL 0.4 and its vLLM, for the bench
#   SKYRL_R3_OUT           directory for the report and the logs, which must not exist [r3-report/nightly]
#   SKYRL_R3_UV, SKYRL_R3_CACHE    as for ci/env.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
model="${SKYRL_R3_MODEL:-allenai/OLMoE-1B-7B-0924-Instruct}"
out="$(realpath -m "${SKYRL_R3_OUT:-r3-report/nightly}")"
cache="${SKYRL_R3_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/skyrl-r3}"
uv="${SKYRL_R3_UV:-uv}"
cd "$here/.."
# A test that finds no GPU fails instead of being skipped.
export R3_REQUIRE_GPU=1 PYTHONUNBUFFERED=1

fail() { echo "nightly: $*" >&2; exit 1; }
say() { printf '\n== %s (at %s s)\n' "$*" "$SECONDS"; }

gpu="$(timeout 60 nvidia-smi --query-gpu=name --format=csv,noheader 2>&1)" ||
    fail "no GPU: nvidia-smi says: ${gpu:-nothing}. This script needs one; ci/test.sh and ci/demo.sh do not."
[ ! -e "$out" ] || fail "$out exists; set SKYRL_R3_OUT to a directory that does not"
command -v "$uv" >/dev/null || fail "no uv on the path (https://docs.astral.sh/uv); install it or set SKYRL_R3_UV to it"

# /tmp, not $TMPDIR: Ray puts Unix sockets below it, and their paths may have 107 characters.
work="$(mktemp -d /tmp/r3-nightly.XXXXXX)"
running=""
finish() {
    local status=$?
    trap - EXIT INT TERM
    if [ -n "$running" ] && kill -0 "$running" 2>/dev/null; then
        kill -TERM "$running"
        wait "$running" || true
    fi
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# bounded SIGNAL SECONDS COMMAND...: a command that is ended when its time is up, with the processes that it started.
# In the background and waited for, so that the traps run at once.
bounded() {
    local status=0
    timeout -s "$1" -k 60 "$2" "${@:3}" &
    running=$!
    wait "$running" || status=$?
    running=""
    return "$status"
}

# Below $1, an environment with this repository's wheel that else has what the Python $2 has.
layer() {
    "$uv" venv -q --python "$2" "$1" && "$uv" pip install -q --python "$1/bin/python" --no-deps "$work"/dist/*.whl &&
        "$2" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
            >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_layer_below.pth"
}

say "environment"
base="${SKYRL_R3_PYTHON_GPU:-}"
if [ -z "$base" ]; then
    key="$(cat "$here/requirements-gpu.txt" "$here/overrides-gpu.txt" | sha256sum | cut -c1-16)"
    base="$cache/gpu-$key/bin/python"
    if [ ! -e "$cache/gpu-$key/.complete" ]; then
        echo "[nightly] making $cache/gpu-$key (about 15 GB)"
        rm -rf "$cache/gpu-$key"
        bounded TERM 600 "$uv" venv -q --python 3.12 "$cache/gpu-$key"
        bounded TERM 3600 "$uv" pip install -q --python "$base" --overrides "$here/overrides-gpu.txt" \
            -r "$here/requirements-gpu.txt"
        touch "$cache/gpu-$key/.complete"
    fi
fi
bounded TERM 600 "$uv" build -q --wheel --python "$base" --out-dir "$work/dist" .
layer "$work/0.3" "$base"
python="$work/0.3/bin/python"
# Programs that packages of $base start, as vLLM does ninja.
PATH="$work/0.3/bin:$(dirname "$base"):$PATH"
benches=(--python "$python")
if [ -n "${SKYRL_R3_PYTHON_04:-}" ]; then
    layer "$work/0.4" "$SKYRL_R3_PYTHON_04"
    benches+=(--python "$work/0.4/bin/python")
fi
bounded TERM 300 "$python" -c 'import sys, torch
torch.cuda.is_available() or sys.exit(f"torch {torch.__version__} in {sys.prefix} sees no GPU")' ||
    fail "nvidia-smi sees $gpu, but torch does not"
mkdir -p "$out/logs"

problems=()
# step NAME LOG SIGNAL SECONDS COMMAND...: a part of the run. What it prints goes to the log as well.
step() {
    local name="$1" log="logs/$2" status=0
    say "$name"
    bounded "${@:3}" > >(tee "$out/$log") 2>&1 || status=$?
    [ "$status" -eq 0 ] && return
    local why="ended with status $status"
    [ "$status" -ne 124 ] || why="was ended after $4 s"
    echo "$name $why" >&2
    problems+=("Failed: $name $why; see $log.")
}
missing=()
facts=()

for engine in vllm transformers; do
    # On SIGABRT, pytest writes where each thread is.
    step "tests of real generation, $engine" "tests-$engine.log" ABRT 5400 "$python" -m pytest gpu_tests \
        --r3-device cuda --r3-engine "$engine" --r3-model "$model" --r3-report "$out/facts-$engine.json" \
        -q -p no:cacheprovider --disable-warnings
    [ -e "$out/facts-$engine.json" ] && facts+=("$out/facts-$engine.json")
done

step "skyrl-r3 bench" bench.log TERM 3600 skyrl-r3 bench "${benches[@]}" --json "$out/bench.json"
[ -n "${SKYRL_R3_PYTHON_04:-}" ] || missing+=("Bench with SkyRL 0.4: SKYRL_R3_PYTHON_04 names no environment of it.")

absent="$(bounded TERM 300 "$python" -c 'from importlib.util import find_spec
wanted = ("megatron.core", "megatron.bridge", "transformer_engine", "flash_attn")
print(*(name for name in wanted if find_spec(name.split(".")[0]) is None or find_spec(name) is None), sep=", ")')" ||
    absent="Python that can be asked"
if [ -z "$absent" ]; then
    step "two steps of SkyRL's training" training.log TERM 3600 "$python" -m gpu_tests.short_training \
        --model "$model" --out "$work/training"
else
    missing+=("SkyRL's own training: no $absent in the environment; SkyRL's megatron extra has them.")
fi

say "report"
arguments=(--title "Real generation on $gpu: $model" --out "$out")
[ -e "$out/bench.json" ] && arguments+=(--bench "$out/bench.json")
for sentence in "${problems[@]}" "${missing[@]}"; do
    arguments+=(--not-run "$sentence")
done
bounded TERM 600 "$python" -m gpu_tests.report "${facts[@]}" "${arguments[@]}" ||
    problems+=("Failed: the report.")

printf '%s\n' "${problems[@]:-nightly: nothing failed}" "${missing[@]}"
[ "${#problems[@]}" -eq 0 ]
