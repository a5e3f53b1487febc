#!/usr/bin/env bash
# What a newcomer does with the package, for real: builds wheel and sdist, installs each with pip into an environment that
# has nothing else, not even SkyRL, asks it what is wrong there, and uninstalls it. Nothing may be left behind.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/env.sh"
work="$(mktemp -d /tmp/r3-package.XXXXXX)"
trap 'rm -rf "$work"' EXIT

fail() { echo "package: $*" >&2; exit 1; }

"$SKYRL_R3_UV" build -q --python "$SKYRL_R3_PY" --out-dir "$work/dist" "$here/.."
for archive in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
    env="$work/env-${archive##*.}"
    "$SKYRL_R3_PY" -m venv "$env"
    "$env/bin/pip" install -q --disable-pip-version-check "$archive"
    "$env/bin/pip" check
    for command in "$env/bin/skyrl-r3" "$env/bin/python -m skyrl_r3"; do
        status=0
        # From outside the checkout, whose skyrl_r3 would be found first.
        (cd "$work" && $command status --json) >"$work/status.json" || status=$?
        [ "$status" -eq 1 ] || fail "$command status: expected exit status 1 without SkyRL, got $status"
        "$env/bin/python" - "$work/status.json" <<'PY'
import json, sys
facts = json.load(open(sys.argv[1]))
problems = [problem["kind"] for problem in facts["here"]["problems"]]
sys.exit(None if problems == ["no-skyrl"] else f"package: expected that SkyRL is missing, and nothing else: {problems}")
PY
    done
    (cd "$work" && "$env/bin/python" -X importtime -c "import skyrl_r3" 2>&1 | grep -E "skyrl_r3(\.autoload)?$")
    "$env/bin/pip" uninstall -q -y --disable-pip-version-check skyrl-r3
    left="$(find "$env" -iname '*skyrl*')"
    [ -z "$left" ] || fail "left behind by pip uninstall: $left"
    echo "${archive##*/}: installs, says that SkyRL is missing, and leaves nothing behind"
done
