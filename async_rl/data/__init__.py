"""Datasets and chat templates: examples of files become `Task`s, messages become token ids.

Reading, mixing and ordering datasets and everything about chat templates belongs here. What happens to a task
once it is dispatched belongs in `async_rl.rollout`.
"""
