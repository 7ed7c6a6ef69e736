#!/usr/bin/env bash
# Runs the checks that need CUDA (tests/test_cuda.py) and writes a page to paste into an issue: versions, figures, failures.
# Only the set-up downloads anything. Arguments go to pytest.
#
#   bash scripts/gpu_check.sh                            everything: an hour, we expect
#   bash scripts/gpu_check.sh --no-setup                 with the environment as it is, for a machine without network
#   bash scripts/gpu_check.sh --no-setup -k "machine or eager"    some of it
#
# The page goes to the current directory. OPENRLHF_DBB_REHEARSE=1 tries the script itself where there is no CUDA.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
if [ "${1:-}" = --no-setup ]; then
    shift
else
    bash "$repo/scripts/setup_env.sh" --test
fi
PATH=$OPENRLHF_DBB_VENV/bin:$PATH
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}  # nothing is asked of the hub

page=$PWD/gpu-check-$(uname -n)-$(date +%Y%m%d-%H%M%S)
cd "$repo"
status=0
python -m pytest -m cuda tests/test_cuda.py --verbose --tb=short -o junit_family=xunit1 \
    --junitxml "$page.xml" "$@" || status=$?
if python scripts/gpu_page.py "$page.xml" >"$page.md"; then
    echo "gpu_check: $SECONDS s, exit status $status; the page is $page.md"
else
    rm "$page.md"
fi
exit "$status"
