"""Ranges of whole numbers."""


def overlap(first, second):
    """Return how many whole numbers two ranges have in common; both ends belong to a range."""
    begin, end = max(first[0], second[0]), min(first[1], second[1])
    return end - begin
