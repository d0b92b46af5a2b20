#!/usr/bin/env bash
# Profile this machine in one prepared run of at most six minutes: headline policies, shipped policies, a sweep.
#   ./scripts/profile_target.sh [OUT]          on the CUDA device; results in OUT (default results/<device>)
#   ./scripts/profile_target.sh --cpu [OUT]    the same on this machine's processor, as far as it gets in the time
#   ./scripts/profile_target.sh --smoke [OUT]  a rehearsal on the processor in about half a minute where nothing else runs
# Needs python with torch, numpy and PyYAML (PYTHON names another). Clocks, power and MIG are read and written down, and
# never changed: figures are of the machine as it is. A part that fails or takes too long is named; the others go on.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=cuda out=
for argument in "$@"; do
    case $argument in
    --cpu) mode=cpu ;;
    --smoke) mode=smoke ;;
    -h | --help) sed -n '2,7s/^# \?//p' "$0"; exit 0 ;;
    -*) echo "$argument: unknown; allowed: --cpu, --smoke, --help, a folder" >&2; exit 2 ;;
    *) out=$argument ;;
    esac
done
python=${PYTHON:-python}
export OMP_WAIT_POLICY=PASSIVE PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
limit=360 # seconds in all

device=cpu
[ "$mode" = cuda ] && device=cuda
name=$("$python" - "$device" <<'PY'
import re, sys, torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("no CUDA device: torch.cuda.is_available() is False; --cpu runs on the processor")
print(re.sub("[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()) if sys.argv[1] == "cuda" else "cpu")
PY
)
out=${out:-results/$name}
mkdir -p "$out"
configs=$(mktemp -d)
trap 'rm -rf "$configs"' EXIT
failed=()

clocks() { # what the device says of itself, read only
    if [ "$device" = cuda ] && command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.applications.graphics,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active,mig.mode.current --format=csv
    else
        echo "no nvidia-smi was asked"
    fi
}

part() { # NAME SECONDS COMMAND ...: one part within its own limit and what is left of the whole
    local what=$1 most=$2 left=$((limit - SECONDS))
    shift 2
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 5 ]; then
        echo "== $what: no time left" >&2
        failed+=("$what: no time left")
        return
    fi
    echo "== $what (at most $most s, $SECONDS s gone)" >&2
    if ! timeout "$most" "$@" >"$out/$what.log" 2>&1; then
        tail -3 "$out/$what.log" >&2
        failed+=("$what")
    else
        rm -f "$out/$what.log"
    fi
}

profile() { # NAME SECONDS CONFIG KEY=VALUE ...
    local what=$1 most=$2 config=$3
    shift 3
    part "$what" "$most" "$python" -m robotattn.latency profile "$config" device="$device" out="$out/$what.json" "$@"
}

sweep() { # NAME SECONDS WORD ...
    local what=$1 most=$2
    shift 2
    part "$what" "$most" "$python" -m robotattn.latency sweep device="$device" out="$out/$what" "$@"
}

# The worked policy of 605 prefix tokens: 3 cameras x 196 patches + 16 of text + 1 of the arm's state, d 512, 8 heads.
cameras="cameras: {front: [224, 224], wrist: [224, 224], left: [224, 224]}, stem: patch, patch: 16"
size="width: 512, heads: 8, feedforward: 2048"
cat >"$configs/act_605.yaml" <<YAML
policy: {act: {$cameras, $size, encoder_layers: 6, decoder_layers: 6, chunk: 100, grounding: false, attention_labels: false}}
YAML
cat >"$configs/autoregressive_605.yaml" <<YAML
policy: {autoregressive: {$cameras, $size, layers: 6, chunk: 4}}
YAML
cat >"$configs/blockwise_605.yaml" <<YAML
policy: {blockwise: {$cameras, $size, layers: 6, chunk: 50, steps: 10}}
YAML

clocks >"$out/clocks_before.csv"
case $mode in
cuda)
    modes=mode=eager,graph,reduce-overhead,bf16
    profile act_605 60 "$configs/act_605.yaml" hz=50 "$modes" samples=1000
    profile blockwise_605 50 "$configs/blockwise_605.yaml" hz=10 mode=eager,graph,bf16 samples=500
    profile autoregressive_605 50 "$configs/autoregressive_605.yaml" hz=10 mode=eager,graph,bf16 samples=500
    for shipped in act_pixels autoregressive_pixels blockwise_pixels; do
        profile "$shipped" 30 "$shipped.yaml" hz=20 mode=eager,graph samples=500
    done
    sweep sweep 140 policy=act,autoregressive,blockwise cameras=1:4 patch=8,16,32 chunk=4 size=224 width=512 \
        feedforward=2048 layers=6 samples=460 staged=20 seconds=2.5 minutes=2
    ;;
cpu)
    profile act_605 60 "$configs/act_605.yaml" hz=2 samples=100 threads=1
    for shipped in act_pixels autoregressive_pixels blockwise_pixels; do
        profile "$shipped" 40 "$shipped.yaml" hz=20 samples=500 threads=1
    done
    sweep sweep 200 policy=act,autoregressive,blockwise cameras=1:3 patch=8,16 chunk=4,8 layers=2 samples=100 \
        staged=20 repeats=2 minutes=2.5
    ;;
smoke)
    profile act_state 120 act_state.yaml hz=20 samples=50 threads=1
    sweep sweep 120 policy=act,blockwise cameras=1,2 patch=16,32 chunk=1 width=32 heads=2 feedforward=32 layers=1 \
        size=32 samples=30 staged=5 minutes=0.3
    ;;
esac
clocks >"$out/clocks_after.csv"

echo "$SECONDS s; results in $out: $(cd "$out" && ls | tr '\n' ' ')"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
