"""Experiment trackers: send the figures of each step to services or files under well-known names.

One module per kind of tracker belongs here, and the names that trackers use. Prometheus metrics do not.
"""
