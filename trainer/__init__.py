"""The Megatron-Core trainer, which turns batches of trajectories into new weights with one process per rank.

`worker.TrainerWorker` implements a rank of `async_rl.trainer_protocol.Trainer`. What a rank computes, stores
or exchanges with other ranks belongs here. Rollouts, the queue and the train loop belong in `async_rl`, which
imports this package by name only; calls to Megatron-Core belong in `trainer.megatron`.
"""

from trainer.memory import estimate_memory as estimate_memory
from trainer.validate import check as check
from trainer.validate import check_here as check_here
from trainer.validate import describe as describe
