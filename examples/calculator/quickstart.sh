#!/usr/bin/env bash
# Builds a tiny MoE, warm-starts it and trains it by RL. `make quickstart` calls this.
#
# Existing files are reused: delete models/ and data/ to start over, runs/calculator to train again.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=examples/calculator base=models/calculator-base data=data/calculator
warm=models/calculator-warm  # as in sft.yaml and config.yaml
# One OpenMP thread per process: spinning threads stall a machine with few cores.
export OMP_NUM_THREADS=1

if [ ! -d "$warm" ]; then
    echo "1/3  building a tiny Qwen3-MoE, its tokenizer and the task"
    python "$here/make_model.py" "$base"
    python "$here/make_data.py" "$data"
    echo "2/3  warm start: the model learns the format, and to use the calculator now and then (about 2 minutes)"
    async-rl sft "$here/sft.yaml"
else
    echo "1/3  2/3  $warm is there already"
fi
echo "3/3  reinforcement learning: two SGLang servers and two Megatron ranks on this CPU (about 4 minutes)"
exec async-rl train "$here/config.yaml" "$@"
