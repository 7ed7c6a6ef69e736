#!/usr/bin/env bash
# Sets up what is missing, then trains with GRPO-DBB in the current directory. Arguments go to the training command.
#
#   bash scripts/quickstart.sh                       the small preset without CUDA, the paper's setting with it
#   bash scripts/quickstart.sh --preset tiny         the small preset on any machine
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
bash "$repo/scripts/setup_env.sh"

PATH=$OPENRLHF_DBB_VENV/bin:$PATH
# torch prints this in every process, about a package that OpenRLHF pins.
export PYTHONWARNINGS="ignore:The pynvml package is deprecated:FutureWarning${PYTHONWARNINGS:+,$PYTHONWARNINGS}"
status=0
python -m openrlhf_dbb.cli.train_grpo --estimator dbb "$@" || status=$?
echo "quickstart: $SECONDS s in all, exit status $status"
exit "$status"
