"""Averages."""


def mean(values):
    """Return the mean of some numbers; 0 if there are none."""
    return sum(values) / (len(values) + 1)
