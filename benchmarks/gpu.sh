#!/usr/bin/env bash
# What wants a GPU, in one command: the tests of the GPU, then the fused head against its floor. More
# arguments go to head_gpu.py; $OUT is where results go. Three minutes.
#   bash benchmarks/gpu.sh [--shapes qwen3-8b …]
# Liger is measured beside it when it can be imported:
#   PYTHONPATH=/where/liger/is bash benchmarks/gpu.sh
# And, each a command of its own: head_variants.py (40 s), hint_scoring.py --device cuda --model
# qwen3-0.6b (a minute), long_episode.py --device cuda (a minute), prefix_sharing.py --device cuda --model
# qwen3-0.6b (two minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
out=${OUT:-benchmarks/results}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv || true
status=0
# Also when a test fails: a number beside a failure is still a number.
python3 -m pytest -p no:cacheprovider -q tests/gpu || status=$?
python3 benchmarks/head_gpu.py --out "$out/head_gpu.json" "$@" || status=$?
exit "$status"
