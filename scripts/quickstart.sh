#!/usr/bin/env bash
# From nothing to a page of results: record demonstrations, train ACT, evaluate it, time it, report.
#   ./scripts/quickstart.sh          from camera images and text, beside the checkpoint that ships with the package
#   ./scripts/quickstart.sh --state  from object poses instead of images
#   ./scripts/quickstart.sh --small  a rehearsal of every step in a minute or two; it learns next to nothing
# Makes .venv if it is not there. Safe to run twice: it goes on where it stopped and skips what is done.
set -euo pipefail
cd "$(dirname "$0")/.."

variant=pixels size=full
for argument in "$@"; do
    case $argument in
    --state) variant=state ;;
    --small) size=small ;;
    -h | --help) sed -n '2,6s/^# \?//p' "$0"; exit 0 ;;
    *) echo "$argument: unknown; allowed: --state, --small, --help" >&2; exit 2 ;;
    esac
done
source scripts/setup.sh

case $variant in
pixels) config=act_pixels_quick sees=(--cameras front:96) demos=600 shipped=assets/checkpoints/act_pixels ;;
state) config=act_state sees=(--object-tokens) demos=300 shipped= ;;
esac
episodes=100 flags=()
name=act_$variant
if [ $size = small ]; then
    demos=8 episodes=4 name=small_$variant
    flags=(--steps 20 --warmup 2 --batch 8)
fi
data=demos/$name run=runs/quickstart/$name

# Show each command, then run it; its own line of JSON goes to the folder, since only one ends this script.
robotattn() {
    say "robotattn $*"
    .venv/bin/robotattn "$@" | tee "$log" | sed '/^{"command"/d'
}

# Tell whether a result was made from exactly this checkpoint: both carry the fingerprint of the weights.
made_from() {
    [ -e "$1" ] && .venv/bin/python - "$1" "$2" <<'PYTHON'
import json, pathlib, sys

result, folder = map(pathlib.Path, sys.argv[1:])
inner = folder / "checkpoint"
fingerprint = json.loads(((inner if inner.is_dir() else folder) / "fingerprint.json").read_text())
sys.exit(json.loads(result.read_text())["fingerprint"]["sha256"] != fingerprint["sha256"])
PYTHON
}

# Evaluate and time a checkpoint into a folder, each unless that is done.
measure() {
    local checkpoint=$1 out=$2
    if made_from "$out/evaluation.json" "$checkpoint"; then
        say "$out/evaluation.json: done already"
    else
        robotattn evaluate "$checkpoint" --episodes $episodes --videos 2 --out "$out/evaluation.json"
    fi
    if made_from "$out/profile.json" "$checkpoint"; then
        say "$out/profile.json: done already"
    else
        robotattn profile "$checkpoint" --out "$out/profile.json"
    fi
}

robotattn record --task pick_up --episodes $demos --out "$data" --hz 10 "${sees[@]}"
robotattn train "configs/$config.yaml" --data "$data" --out "$run" --resume "${flags[@]}"
measure "$run" "$run"
if [ -d "${shipped:-none}" ]; then
    measure "$shipped" runs/quickstart/shipped
fi
rm -f "$log"
say "robotattn report runs/quickstart"
exec .venv/bin/robotattn report runs/quickstart
