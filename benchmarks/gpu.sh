#!/usr/bin/env bash
# What wants a GPU, in one command: the kernels' tests where pytest and hypothesis are installed, then
# the fused head against its floor. More arguments go to head_gpu.py; $OUT is where results go.
#   bash benchmarks/gpu.sh [--shapes qwen3-8b …]
# Liger is measured beside it when it can be imported:
#   PYTHONPATH=/where/liger/is bash benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
out=${OUT:-benchmarks/results}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv || true
if python3 -c 'import hypothesis, pytest' 2>/dev/null; then
    python3 -m pytest -p no:cacheprovider tests/numerics/test_fused_kernels.py
else
    echo "kernel tests: skipped, pytest or hypothesis is not installed here"
fi
python3 benchmarks/head_gpu.py --out "$out/head_gpu.json" "$@"
