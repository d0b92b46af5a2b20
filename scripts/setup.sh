#!/usr/bin/env bash
# Make .venv, install robotattn into it and see to the GL libraries: sourced by quickstart.sh and test.sh, also runs
# alone. Safe to run twice: what is there already is kept. PYTHON=python3.12 chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)  # what pip and apt said; kept only if something went wrong
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# What a missing system package costs: one command, run here where we may, told otherwise.
apt_install() {
    local command="apt-get update; apt-get install -y --no-install-recommends $*"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing system packages: $*"
        DEBIAN_FRONTEND=noninteractive sh -c "$command" >"$log" 2>&1 || { tail -5 "$log" >&2; die "failed: $command"; }
    elif [ "$(id -u)" = 0 ]; then
        die "system packages are missing; on Debian or Ubuntu they are: $*"
    else
        die "system packages are missing. Run this once, then start again:  sudo sh -c '$command'"
    fi
}

make_venv() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then return; fi
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null || die "$python: not found; Python 3.11 or newer is needed"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$python is $("$python" -V 2>&1); Python 3.11 or newer is needed (PYTHON=python3.12 chooses another)"
    say "making .venv with $("$python" -V)"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    "$python" -m venv --clear .venv
}

# A changed pyproject.toml or constraints.txt, another Python or another folder installs again; nothing else does.
fingerprint() { { cat pyproject.toml constraints.txt; .venv/bin/python -V; pwd; } | cksum; }

install_package() {
    if [ "$(cat .venv/installed 2>/dev/null)" = "$(fingerprint)" ]; then return; fi
    say "installing robotattn and what it needs into .venv (a few minutes the first time)"
    # The tested versions only: without them a newer torch would come, with gigabytes of CUDA.
    if ! .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off \
        -c constraints.txt -e '.[dev]' 2>&1 | tee "$log" |
        sed -un -e 's/^Collecting \([^ ]*\).*/    \1/p' -e 's#^Processing .*/\([^/]*\)[.]whl.*#    \1#p'; then
        grep -v '^WARNING: Location' "$log" | tail -15 >&2
        die "pip could not install robotattn; all it said is in $log"
    fi
    fingerprint >.venv/installed
}

# Really render: a library that is there but does not work only shows then. In its own process, since it may hang.
renders() {
    timeout 120 .venv/bin/python - 2>"$log" <<'PYTHON'
import cv2, mujoco
light = "<light pos='0 0 3' dir='0 0 -1'/><geom type='sphere' size='.4' rgba='1 0 0 1'/>"
model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{light}</worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 48, 64) as renderer:
    renderer.update_scene(data)
    image = renderer.render()
assert image.shape == (48, 64, 3) and int(image[..., 0].max()) > 50, "a red ball was drawn, an empty picture came back"
PYTHON
}

check_rendering() {
    export MUJOCO_GL=${MUJOCO_GL:-egl} LP_NUM_THREADS=${LP_NUM_THREADS:-1}
    renders && return
    apt_install libegl1 libgl1 libgl1-mesa-dri libglib2.0-0
    renders && return
    tail -3 "$log" >&2
    die "MuJoCo cannot draw with MUJOCO_GL=$MUJOCO_GL; MUJOCO_GL=osmesa is another way (libosmesa6)"
}

export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}  # as robotattn itself sets it: eight times faster on a busy machine
make_venv
install_package
check_rendering
rm -f "$log"
