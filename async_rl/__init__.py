"""Fully-async partial-rollout orchestration for reinforcement learning of MoE language models."""

__version__ = "0.2.0"
