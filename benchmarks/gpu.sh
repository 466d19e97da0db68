#!/usr/bin/env bash
# Everything that wants a GPU, one after the other: its tests, then the benchmarks. A failure does not
# stop the rest; a last table says what failed, and then the exit status is 1.
#   bash benchmarks/gpu.sh                                     # all, a quarter of an hour or more
#   bash benchmarks/gpu.sh --only sampling growth              # these
#   bash benchmarks/gpu.sh --only opd_step_gpu -- --shapes 0.6b    # one, with its arguments
# Names: tests head_gpu opd_step_gpu sampling hint_scoring long_episode growth prefix_sharing compiled
# TRL, datasets and Liger are measured where they can be imported; without TRL there is no
# opd_step_gpu:
#   PYTHONPATH=/where/they/are bash benchmarks/gpu.sh
# OUT: where results go (benchmarks/results). PYTHON: the interpreter (python3). LIMIT: seconds after
# which one of them is ended and counts as failed (900).
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
out=${OUT:-benchmarks/results} python=${PYTHON:-python3} limit=${LIMIT:-900}
all=(tests head_gpu opd_step_gpu sampling hint_scoring long_episode growth prefix_sharing compiled)

chosen=() more=()
if [[ ${1:-} == --only ]]; then
    shift
    while (($#)) && [[ $1 != -- ]]; do chosen+=("$1") && shift; done
    if ((!${#chosen[@]})); then
        echo "--only: one or more of ${all[*]}" >&2
        exit 2
    fi
fi
for name in "${chosen[@]}"; do
    if [[ " ${all[*]} " != *" $name "* ]]; then
        echo "--only $name: there are ${all[*]}" >&2
        exit 2
    fi
done
if [[ ${1:-} == -- ]]; then
    shift
    more=("$@")
    if ((${#chosen[@]} != 1)); then
        echo "arguments after -- are for one benchmark: name it by --only" >&2
        exit 2
    fi
elif (($#)); then
    echo "$1: not known here; see the head of this file" >&2
    exit 2
fi
((${#chosen[@]})) || chosen=("${all[@]}")

has() { "$python" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$1') is None)"; }

run() {
    local name=$1 file=benchmarks/$1.py
    shift
    case $name in
    tests) set -- -m pytest -p no:cacheprovider -q tests/gpu "$@" ;;
    head_gpu | opd_step_gpu) set -- "$file" --out "$out/$name.json" "$@" ;;
    hint_scoring | prefix_sharing)
        set -- "$file" --device cuda --model qwen3-0.6b --out "$out/$name.json" "$@"
        ;;
    *) set -- "$file" --device cuda --out "$out/$name.json" "$@" ;;
    esac
    timeout --kill-after=20 "$limit" "$python" "$@"
}

mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv || true
lines=() failed=0
for name in "${chosen[@]}"; do
    printf '\n── %s ──\n' "$name"
    began=$SECONDS
    if [[ $name == opd_step_gpu ]] && ! has trl; then
        outcome="left out: TRL cannot be imported"
    elif run "$name" "${more[@]}"; then
        outcome=done
    else
        code=$?
        failed=1
        outcome="FAILED with $code"
        ((code != 124)) || outcome="FAILED: more than $limit s"
    fi
    lines+=("$(printf '| %-14s | %5d | %s |' "$name" "$((SECONDS - began))" "$outcome")")
done
printf '\n| what           |     s | how it ended |\n|---|---|---|\n'
printf '%s\n' "${lines[@]}"
exit "$failed"
