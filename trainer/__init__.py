"""The Megatron-Core trainer: one process a rank, its own schedule, routing replayed."""

from trainer.validate import check as check
