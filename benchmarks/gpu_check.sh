#!/bin/sh
# Tests, costs and speed-ups on one NVIDIA GPU in ten minutes, without network and without installing:
#   benchmarks/gpu_check.sh [--wheels DIR] [options of gpu_check.py]
# --wheels DIR: Python wheels of what is missing here, unpacked beside the results and nowhere else.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
wheels=
out=gpu_check
previous=
for argument in "$@"; do
    shift
    case $previous in
        --wheels) wheels=$argument; previous=; continue ;;
        --out) out=$argument ;;
    esac
    previous=$argument
    case $argument in
        --wheels) continue ;;
        --wheels=*) wheels=${argument#--wheels=}; continue ;;
        --out=*) out=${argument#--out=} ;;
    esac
    set -- "$@" "$argument"
done
path=$root:$root/drafters:$root/verifiers
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "$wheels"/*.whl
    path=$path:$(cd "$out/packages" && pwd)
fi
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$root/benchmarks/gpu_check.py" "$@"
