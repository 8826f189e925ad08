"""Rollouts: run agent loops on tasks and turn them into groups of scored trajectories.

The manager, the group rules and the backends that run attempts belong here. Which engine serves a call
belongs in `async_rl.engines`; what happens to finished groups belongs in `async_rl.store`.
"""
