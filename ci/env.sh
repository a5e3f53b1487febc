#!/usr/bin/env bash
# Finds Python 3.12 and uv, and makes the cached environments: vLLM on a CPU with SkyRL 0.3.0, and a layer on top of it
# with SkyRL 0.4.0.
#
#   ci/env.sh            make them if need be, and print the path of the first, in which the second is line-0.4
#   source ci/env.sh     the same, and export SKYRL_R3_PY (the base Python), SKYRL_R3_UV and SKYRL_R3_ENV (the first
#                        environment); then
#   r3_run_env DIR       builds this repository's wheel and makes two environments that have it, DIR/0.3 and DIR/0.4
#
# Input: SKYRL_R3_PYTHON (a Python to use), SKYRL_R3_CACHE (where to keep environments).

_r3_repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_r3_cache="${SKYRL_R3_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/skyrl-r3}"
_r3_uv_pin="uv>=0.8,<1"

_r3_say() { echo "[env] $*" >&2; }
_r3_uv() { timeout --foreground -k 30 1800 "$SKYRL_R3_UV" "$@"; }
_r3_fail() { echo "[env] error: $*" >&2; return 1; }

# The interpreter behind a command, if that command really runs (a pyenv shim may exist and refuse) and is new enough.
_r3_resolve_python() {
    "$1" -c 'import os, sys
sys.version_info >= (3, 12) or sys.exit(1)
print(os.path.realpath(sys.executable))' 2>/dev/null
}

_r3_find_python() {
    local candidate
    if [ -n "${SKYRL_R3_PYTHON:-}" ]; then
        _r3_resolve_python "$SKYRL_R3_PYTHON" || _r3_fail "SKYRL_R3_PYTHON=$SKYRL_R3_PYTHON: not a Python >= 3.12 that runs"
        return
    fi
    _r3_resolve_python python3.12 && return
    for candidate in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python 2>/dev/null | sort -rV); do
        _r3_resolve_python "$candidate" && return
    done
    _r3_find_uv >/dev/null || return 1
    _r3_say "no Python 3.12 here; getting one through uv"
    _r3_uv python install 3.12 >&2 || { _r3_fail "uv could not install Python 3.12"; return 1; }
    _r3_resolve_python "$("$SKYRL_R3_UV" python find --managed-python 3.12)" || _r3_fail "uv's Python 3.12 does not run"
}

# Sets SKYRL_R3_UV. Without uv on this machine: a small environment of its own, made with whatever Python 3 there is.
_r3_find_uv() {
    local candidate
    for candidate in "${SKYRL_R3_UV:-}" uv "$HOME/.local/bin/uv" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/uv \
        "$_r3_cache/uv/bin/uv"; do
        if [ -n "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then
            SKYRL_R3_UV="$(command -v "$candidate")"
            return
        fi
    done
    _r3_say "no uv here; installing it into $_r3_cache/uv"
    rm -rf "$_r3_cache/uv"
    "${SKYRL_R3_PY:-python3}" -m venv "$_r3_cache/uv" >&2 && "$_r3_cache/uv/bin/python" -m pip install -q "$_r3_uv_pin" >&2 ||
        { _r3_fail "could not install uv (does ${SKYRL_R3_PY:-python3} have venv and pip?)"; return 1; }
    SKYRL_R3_UV="$_r3_cache/uv/bin/uv"
}

# Same requirements, same Python: same environment.
_r3_key() {
    { cat "$_r3_repo"/ci/requirements-*.txt
      echo "$SKYRL_R3_PY $(uname -m)"; "$SKYRL_R3_PY" -VV; } | sha256sum | cut -c1-16
}

# Builds the environment $1. Only the last step, the marker, makes it valid.
_r3_build() {
    local env="$1" start=$SECONDS
    _r3_say "making $env (a few minutes without a download cache)"
    rm -rf "$env"
    # Compiled now: every process of the demo imports torch or vLLM, and some machines forbid writing .pyc files later.
    local -x UV_COMPILE_BYTECODE=1
    _r3_say "installing torch, SkyRL 0.3.0 with its requirements and vLLM for CPUs: 8 GB, the longest step"
    _r3_uv venv -q --python "$SKYRL_R3_PY" "$env" &&
        _r3_uv pip install -q --python "$env/bin/python" -r "$_r3_repo/ci/requirements-skyrl-0.3.txt" &&
        _r3_uv pip install -q --python "$env/bin/python" --no-deps \
            -r "$_r3_repo/ci/requirements-skyrl-0.3-no-deps.txt" &&
        _r3_say "installing SkyRL 0.4.0 and what it needs in other versions" &&
        _r3_layer "$env/line-0.4" "$env" &&
        _r3_uv pip install -q --python "$env/line-0.4/bin/python" --no-deps \
            -r "$_r3_repo/ci/requirements-skyrl-0.4-no-deps.txt" &&
        touch "$env/.complete" || { _r3_fail "could not make $env"; return 1; }
    _r3_say "made in $((SECONDS - start)) s"
}

# An empty environment $1 that sees what is installed in the environment $2, but has whatever is installed in $1 first.
# Whoever starts sys.executable, as Ray does for its workers and vLLM for its engine, gets $1, with no variable to inherit.
_r3_layer() {
    _r3_uv venv -q --python "$SKYRL_R3_PY" "$1" || return 1
    "$1/bin/python" - "$2" <<'PY'
import pathlib, sys, sysconfig

below = pathlib.Path(sysconfig.get_path("purelib", vars={"base": sys.argv[1], "platbase": sys.argv[1]}))
below.is_dir() or sys.exit(f"no site-packages at {below}")
here = pathlib.Path(sysconfig.get_path("purelib"))
# Its .pth files are read as well, so that layers can lie on layers.
(here / "_layer_below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
PY
}

# The cached environments: at most one process builds it, and one that was cut short is built anew.
_r3_env() {
    mkdir -p "$_r3_cache" || return 1
    SKYRL_R3_PY="$(_r3_find_python)" || return 1
    _r3_find_uv || return 1
    SKYRL_R3_ENV="$_r3_cache/env-$(_r3_key)"
    if [ ! -e "$SKYRL_R3_ENV/.complete" ]; then
        (
            flock -w 3600 9 || { _r3_fail "another process has held $SKYRL_R3_ENV.lock for an hour"; exit 1; }
            [ -e "$SKYRL_R3_ENV/.complete" ] || _r3_build "$SKYRL_R3_ENV"
        ) 9>"$SKYRL_R3_ENV.lock" || return 1
    fi
    export SKYRL_R3_PY SKYRL_R3_UV SKYRL_R3_ENV
}

# Fresh environments $1/0.3 and $1/0.4 with this repository's wheel in them, on top of the cached ones, in a few seconds.
#
# The wheel turns itself on through a .pth file, and Python reads those in site directories only, so PYTHONPATH would not
# exercise it. Hence real, thin environments with the wheel in their own site-packages.
# --no-deps: uv would not see the layer below and install numpy a second time; that list has the requirements.
r3_run_env() {
    local dir="$1" line
    rm -rf "$dir" && mkdir -p "$dir" || return 1
    # The cached environment has hatchling, so that a build needs no network.
    _r3_uv build -q --wheel --no-build-isolation --python "$SKYRL_R3_ENV/bin/python" --out-dir "$dir/dist" \
        "$_r3_repo" >&2 || return 1
    for line in 0.3 0.4; do
        local below="$SKYRL_R3_ENV"
        [ "$line" = 0.3 ] || below="$SKYRL_R3_ENV/line-$line"
        _r3_layer "$dir/$line" "$below" &&
            _r3_uv pip install -q --python "$dir/$line/bin/python" --no-deps "$dir"/dist/*.whl || return 1
    done
}

_r3_env || { [ "${BASH_SOURCE[0]}" != "$0" ] && return 1 || exit 1; }
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "$SKYRL_R3_ENV"
fi
