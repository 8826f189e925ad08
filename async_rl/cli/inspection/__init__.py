"""Trajectories for people: those of a run (`browse`), and those of a loop that someone tries (`try_out`).

Text and terminal views of single trajectories belong here. Figures of a whole run belong in
`async_rl.observability`.
"""
