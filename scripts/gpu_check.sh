#!/bin/sh
# What only a CUDA device can show, in one run of at most 8 minutes: the GPU tests, raw figures of the
# device, and the benches. Everything is written to the folder OUT; a part that fails or takes too
# long does not stop the others.
#
#   sh scripts/gpu_check.sh OUT
#
# PYTHON: interpreter with a CUDA build of torch (python3). PACKAGES: a folder with the packages that it
# lacks, on a machine without a network; sh scripts/gpu_check.sh --packages FOLDER VERSION fills one for
# that version of Python (3.12, say) where there is a network.
set -u

PYTHON=${PYTHON:-python3}

if [ "${1:-}" = --packages ]; then
    exec "$PYTHON" -m pip install --quiet --upgrade --target "$2" --only-binary=:all: --no-deps \
        --python-version "$3" --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux_2_28_x86_64 \
        "safetensors>=0.8" xxhash msgpack "msgspec>=0.20" "typer>=0.26" rich shellingham click \
        markdown-it-py mdurl pygments typing_extensions pytest pytest-timeout hypothesis pluggy iniconfig \
        packaging sortedcontainers
fi

OUT=${1:?usage: sh scripts/gpu_check.sh OUT}
mkdir -p "$OUT" || exit 2
ROOT=$(cd "$(dirname "$0")/.." && pwd)
# The command `everstep bench` is found by its entry point, also where nothing is installed.
PLUGIN=$(mktemp -d)
trap 'rm -rf "$PLUGIN"' EXIT
export PYTHONPATH="$ROOT/src:$ROOT/bench/src${PACKAGES:+:$PACKAGES}:$PLUGIN"
if ! "$PYTHON" -c 'from importlib.metadata import distribution as d; d("everstep-bench")' 2>/dev/null; then
    mkdir "$PLUGIN/everstep_bench-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: everstep-bench\nVersion: 0\n' \
        >"$PLUGIN/everstep_bench-0.dist-info/METADATA"
    sed -n 's/^\[project.entry-points."\(.*\)"\]$/[\1]/p; /^\(bench\|drill\) = /s/"//gp' \
        "$ROOT/bench/pyproject.toml" >"$PLUGIN/everstep_bench-0.dist-info/entry_points.txt"
fi
cd "$ROOT" || exit 2

failed=0
# part NAME SECONDS COMMAND...: what it prints goes to OUT/NAME.txt.
part() {
    name=$1 limit_s=$2
    shift 2
    began=$(date +%s)
    timeout "$limit_s" "$@" >"$OUT/$name.txt" 2>&1
    status=$?
    [ "$status" = 0 ] || failed=1
    echo "$name: status $status, $(($(date +%s) - began)) s"
    tail -n "${SHOWN:-3}" "$OUT/$name.txt"
}

part machine 10 sh -c "nvidia-smi; git log -1 --format=%h 2>/dev/null; $PYTHON -c 'import torch; print(torch.__version__, torch.version.cuda)'"
SHOWN=60 part device 80 "$PYTHON" -m everstep_bench.device ${DEVICE:+--device $DEVICE} --out "$OUT/device.jsonl"
RUN="$PYTHON -m everstep bench"
STALL="$RUN stall --device ${DEVICE:-cuda} --every 8 --repeats ${REPEATS:-5}"
# Workloads of four layers: 1 G parameters in bfloat16, 300 M with 64 sequences.
SHOWN=40 part stall-1g 110 $STALL --params "${LARGE:-1G}" --dtype bfloat16 --layers 4 --within 90 \
    --arms "${ARMS:-lazy,lazy-half,lazy-staged,gockpt_o,gockpt_o-staged,torch_checkpointing,dcp-overlap}"
SHOWN=40 part stall-300m 80 $STALL --params "${SMALL:-300M}" --batch 64 --layers 4 --within 60 \
    --arms "${ARMS:-lazy,lazy-half,lazy-staged,torchsnapshot}"
SHOWN=40 part step 100 $RUN step --device "${DEVICE:-cuda}" --params "${STEPS:-100M}" --kills 0 --no-replay \
    --repeats "${REPEATS:-3}" --arms none,compressed,logged,logged-in-flight,lowdiff,lowdiff_plus
part tests 100 "$PYTHON" -m pytest tests/gpu -q ${TESTS:-}
exit $failed
