"""Terminal views of trajectories: those of a run (`browse`), and those of an agent loop under test
(`try_out`).

Text and terminal views of single trajectories belong here. Figures of a whole run belong in
`async_rl.observability`.
"""
