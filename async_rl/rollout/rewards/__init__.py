"""Rewards: how a user's reward function or reward server is called, and what its result means.

Limits, retries and signatures of rewards belong here. Reward functions themselves belong in `agent_loops`.
"""
