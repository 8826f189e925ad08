"""Experiment trackers: each step's figures under the names that users know, to wandb, TensorBoard, files."""
