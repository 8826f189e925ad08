"""Generic asyncio, thread and process tools: nothing here knows of engines, trajectories or training.

Named waits, task supervision, threads for blocking user functions, worker processes, ending processes,
loading objects by dotted path, replacing files and YAML 1.2 belong here. Domain logic does not.
"""
