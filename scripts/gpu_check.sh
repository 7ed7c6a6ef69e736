#!/usr/bin/env bash
# Runs the checks that need CUDA (tests/test_cuda.py) and ends with a table to paste into an issue. The report,
# gpu-check-HOST-DATE.xml in the current directory, also holds figures and failures; attach it. Only the set-up downloads
# anything. Arguments go to pytest.
#
#   bash scripts/gpu_check.sh                            everything: an hour, we expect
#   bash scripts/gpu_check.sh --no-setup                 with the packages that python finds, without network
#   bash scripts/gpu_check.sh --no-setup -k "machine or graphs_sleep or evaluate or trl or lora or packed"
#
# What most people use comes first: CUDA graphs with sleep, evaluate, TRL, LoRA, packing.
# OPENRLHF_DBB_REHEARSE=1 tries the script itself where there is no CUDA.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
if [ "${1:-}" = --no-setup ]; then
    shift
else
    bash "$repo/scripts/setup_env.sh" --test
fi
[ ! -d "$OPENRLHF_DBB_VENV" ] || PATH=$OPENRLHF_DBB_VENV/bin:$PATH
type -P python >/dev/null || python() { python3 "$@"; }
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}  # packages that are given have no openrlhf_dbb among them
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}  # nothing is downloaded from the hub

report=$PWD/gpu-check-$(uname -n)-$(date +%Y%m%d-%H%M%S).xml
cd "$repo"
status=0
python -m pytest -m cuda tests/test_cuda.py --verbose --tb=short -rs -o junit_family=xunit1 \
    --junitxml "$report" "$@" || status=$?
[ ! -f "$report" ] || python scripts/gpu_table.py "$report"
echo "gpu_check: $SECONDS s, exit status $status; the report is $report"
exit "$status"
