"""Estimates the memory of trainer ranks from config.json and the layout, without torch."""

from trainer.memory.estimate import estimate_memory as estimate_memory
