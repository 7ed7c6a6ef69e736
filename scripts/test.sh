#!/usr/bin/env bash
# Sets up what is missing, then lints, type-checks, builds the documentation and tests. Arguments go to pytest, which then runs once.
#
#   bash scripts/test.sh                            everything
#   bash scripts/test.sh -m "not e2e" -n logical    without trainings, on all cores: about 6 minutes on two
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
bash "$repo/scripts/setup_env.sh" --test

PATH=$OPENRLHF_DBB_VENV/bin:$PATH
cd "$repo"
ruff check .
ruff format --check .
mypy
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet  # the variable: no announcement of the theme's successor
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# Tests share the cores, in the order of tests/conftest.py. Trainings have several processes each: two at a time share the
# cores, one has the GPUs. All parts run, even if the first fails. The second is given its files: to collect the others
# imports vLLM.
failed=0
at_a_time=2
[ -z "$(command -v nvidia-smi)" ] || at_a_time=1
spread=(--dist loadfile --no-loadscope-reorder --durations 15)
python -m pytest -m "not e2e" --numprocesses logical --maxprocesses 8 "${spread[@]}" || failed=$?
mapfile -t trainings < <(grep --files-with-matches 'mark\.e2e' tests/test_*.py)
python -m pytest -m e2e --numprocesses "$at_a_time" "${spread[@]}" "${trainings[@]}" || failed=$?
PYTHONPATH=$OPENRLHF_DBB_VENV/verl python -m pytest tests/test_verl*.py || failed=$?  # verl is apart, see requirements/lock.sh
exit "$failed"
