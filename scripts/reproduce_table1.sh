#!/usr/bin/env bash
# The paper's Table 1 on GPUs: five methods trained with the same rollouts, nine benchmarks, four evaluation runs each.
# Days of GPU time (the paper: 4 H200 for 1.7B, 8 for 8B). Finished runs and evaluations are not repeated, and an
# interrupted one continues. What the paper reports is in table1_expected.csv beside this file.
#
#   bash scripts/reproduce_table1.sh                    Qwen3-1.7B-Base, in the current directory
#   bash scripts/reproduce_table1.sh qwen3-8b           Qwen3-8B-Base
#   DRY_RUN=1 bash scripts/reproduce_table1.sh          only shows the commands
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OPENRLHF_DBB_VENV=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
export OPENRLHF_DBB_VENV
preset=${1:-qwen3-1.7b}
case $preset in
    qwen3-1.7b) length=4096 ;;
    qwen3-8b) length=8192 ;;
    *) echo "error: preset $preset is not in Table 1; use qwen3-1.7b or qwen3-8b" >&2; exit 2 ;;
esac

run() {
    echo "+ $*"
    [[ ${DRY_RUN:-} ]] || "$@"
}

[[ ${DRY_RUN:-} ]] || bash "$repo/scripts/setup_env.sh"
PATH=$OPENRLHF_DBB_VENV/bin:$PATH
benchmarks=math500,minerva,aime24,aime25,amc24,olympiad,mmlu_pro,gpqa_diamond,bbh
evaluated=()
for spec in grpo:point repo:point greso:point dapo:point grpo:dbb; do
    method=${spec%:*} estimator=${spec#*:}
    name=$preset-$method-$estimator
    if [[ ! -f runs/$name/model/config.json ]]; then
        resume=()
        [[ -d runs/$name ]] && resume=(--resume "$name")
        # 17,280 prompts x 8 x 4: all methods generate the same number of rollouts
        run python -m openrlhf_dbb train --preset "$preset" --method "$method" \
            --estimator "$estimator" --train.max_rollouts 552960 --run_name "$name" ${resume[@]+"${resume[@]}"}
    fi
    # the best checkpoint by validation (runs/$name/best), as in the paper
    run python -m openrlhf_dbb evaluate --model "runs/$name" --benchmarks "$benchmarks" \
        --n 8 --runs 4 --max_new_tokens "$length" --name "$name" --run "$name"
    evaluated+=("$name")
done
run python -m openrlhf_dbb evaluate compare "${evaluated[@]}" --of "$preset-grpo-dbb" --output "table1-$preset"
echo "compare table1-$preset with $repo/scripts/table1_expected.csv"
