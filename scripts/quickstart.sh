#!/usr/bin/env bash
# Sets up what is missing, then trains SmolLM2-135M on sums in the current directory, on a GPU if there is one.
# The paper's setting takes days of GPUs and is asked for by --preset qwen3-1.7b.
#
#   bash scripts/quickstart.sh [flags of the training command]
#   bash scripts/quickstart.sh --preset tiny     a far smaller model, half a minute
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
bash "$repo/scripts/setup_env.sh"

PATH=$OPENRLHF_DBB_VENV/bin:$PATH
# torch prints this in every process, about a package that OpenRLHF pins.
export PYTHONWARNINGS="ignore:The pynvml package is deprecated:FutureWarning${PYTHONWARNINGS:+,$PYTHONWARNINGS}"
status=0
python -m openrlhf_dbb train --preset smollm2 "$@" || status=$?
echo "quickstart: $SECONDS s in all, exit status $status"
if [ "$status" = 0 ]; then
    echo "the page: source $OPENRLHF_DBB_VENV/bin/activate; openrlhf-dbb serve (your own data: $repo/docs/tutorial.md)"
fi
exit "$status"
