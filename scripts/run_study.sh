#!/usr/bin/env bash
# Sets up what is missing, then trains and draws the study into ./study-runs. If interrupted, the same command continues.
#
#   bash scripts/run_study.sh --smoke                    the whole machinery in minutes, into ./study-smoke
#   bash scripts/run_study.sh                            the study of docs/study.md, hours on two cores
#   bash scripts/run_study.sh --experiments n2           only the primary experiment
#   bash scripts/run_study.sh --protocol gpu             the same arms at the paper's scale (not run yet)
#
# Other arguments: python -m openrlhf_dbb.study --help
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
bash "$repo/scripts/setup_env.sh"

arguments=()
for argument in "$@"; do
    case $argument in
        --smoke) arguments+=(--protocol smoke --output study-smoke) ;;
        *) arguments+=("$argument") ;;
    esac
done
PATH=$OPENRLHF_DBB_VENV/bin:$PATH
exec python -m openrlhf_dbb.study "${arguments[@]}"
