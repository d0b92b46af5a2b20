#!/usr/bin/env bash
# Check everything: style, types, the built wheel in an environment of its own, and then all tests.
#   ./scripts/test.sh            all of it (what CI runs)
#   ./scripts/test.sh ARGUMENTS  only pytest, with these arguments: ./scripts/test.sh tests/test_chunks.py -x
# Makes .venv if it is not there. The last line is pytest's summary; a table and one line of JSON stand above it.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h | --help) sed -n '2,5s/^# \?//p' "$0"; exit 0 ;; esac
source scripts/setup.sh

# Tests that need nothing but the installed package, quick ones first to fail.
wheel_files=(tests/test_{cli,config,chunks,loop,seeds,instructions,text,attention,statistics}.py)

check_wheel() {
    local place=.venv/wheel python
    rm -rf "$place/dist" "$place/tests"
    mkdir -p "$place"
    say "building the sdist and, from it, the wheel"
    .venv/bin/python -m build --outdir "$place/dist" . >"$log" 2>&1 ||
        { tail -20 "$log" >&2; die "the package does not build"; }
    say "installing the wheel into an environment of its own"
    [ -x "$place/venv/bin/python" ] || .venv/bin/python -m venv "$place/venv"
    python=$PWD/$place/venv/bin/python
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    "$python" -m pip install -q -c constraints.txt "$place"/dist/*.whl pytest typeguard 2>"$log" &&
        "$python" -m pip install -q --no-deps --force-reinstall "$place"/dist/*.whl 2>"$log" ||
        { grep -v '^WARNING: Location' "$log" | tail -20 >&2; die "the wheel does not install"; }
    say "testing the installed package"
    cp -r tests pyproject.toml "$place"
    (cd "$place" && "$python" -c 'import robotattn; assert "site-packages" in robotattn.__file__, robotattn.__file__' &&
        "$python" -m pytest -q "${wheel_files[@]}")
}

if [ $# -eq 0 ]; then
    say "style and types"
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy robotattn scripts
    check_wheel
fi
say "all tests"
rm -f "$log"
exec .venv/bin/python -m pytest --table "$@"
