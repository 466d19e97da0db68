#!/bin/bash
# One node of 8 GPUs: 4 serve the teacher (2 replicas of 2), 4 train and sample.
# TEACHER_KEY=… bash examples/cluster/node.sh RECIPE RUN
set -euo pipefail

recipe=$1
run=$2
: "${TEACHER_KEY:?is not set: the key that the teacher and its clients share}"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

servers=()
for i in 0 1; do
    CUDA_VISIBLE_DEVICES="$((4 + 2 * i)),$((5 + 2 * i))" \
        courtside serve "$recipe" --url "http://localhost:$((8001 + i))" \
        --option "--tensor-parallel-size 2" > "teacher-$i.log" 2>&1 &
    servers+=($!)
done
for i in 0 1; do
    until curl -sf -o /dev/null "http://localhost:$((8001 + i))/health"; do
        kill -0 "${servers[i]}" || { echo "teacher $i ended; see teacher-$i.log" >&2; exit 1; }
        sleep 5
    done
done

CUDA_VISIBLE_DEVICES=0,1,2,3 courtside train "$recipe" --run "$run" --nproc 4
