"""The loss: policy objectives, off-policy corrections, advantages, KL terms and log-probs of trained tokens.

Formulas and their sums belong here, each with its source. Model, schedule and communication do not; the one
exception is the exchange of a vocabulary that is split over ranks (`log_probs`).
"""
