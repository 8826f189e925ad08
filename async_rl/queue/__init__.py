"""Between rollouts and trainer: groups in, batches out."""
