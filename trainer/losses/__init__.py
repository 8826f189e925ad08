"""The loss: policy objectives, off-policy corrections, advantages, KL terms and log-probs of trained tokens.

Formulas and their sums belong here, with the source of each. Model, schedule and communication do not.
"""
