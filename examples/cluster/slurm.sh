#!/usr/bin/env bash
# One run over several hosts under SLURM: Ray on every host, the training on the first.
#
#   sbatch --nodes 2 --gpus-per-node 8 examples/cluster/slurm.sh --preset qwen3-8b --actor.num_nodes 2
#
# Arguments go to the training command. Submit it from a folder that all hosts share: the run's files go below it. To
# continue a run that was cut off by the time limit, submit it again with --resume NAME --store.take_over.
#SBATCH --job-name openrlhf_dbb
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
set -euo pipefail

PATH=${OPENRLHF_DBB_VENV:?set it to the virtual environment, which every host has at the same place}/bin:$PATH
port=6379
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(srun --nodes 1 --ntasks 1 --nodelist "${hosts[0]}" hostname --ip-address | awk '{print $1}')

cpus=(--cpus-per-task "$SLURM_CPUS_ON_NODE") # Ray needs a CPU for each GPU, and srun gives a task one unless asked
srun --nodes 1 --ntasks 1 "${cpus[@]}" --nodelist "${hosts[0]}" \
    ray start --head --node-ip-address "$head" --port "$port" --disable-usage-stats --block &
for host in "${hosts[@]:1}"; do
    srun --nodes 1 --ntasks 1 "${cpus[@]}" --nodelist "$host" \
        ray start --address "$head:$port" --disable-usage-stats --block &
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

for _ in $(seq 60); do # seconds, until all hosts have joined
    joined=$(RAY_ADDRESS=$head:$port python -c '
import ray
ray.init(logging_level="error")
print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null) || joined=0
    [ "$joined" -ge "${#hosts[@]}" ] && break
    sleep 1
done
[ "$joined" -ge "${#hosts[@]}" ] || { echo "only $joined of ${#hosts[@]} hosts have joined Ray" >&2; exit 1; }

RAY_ADDRESS=$head:$port python -m openrlhf_dbb train --estimator dbb "$@"
