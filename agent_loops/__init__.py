"""Ready agent loops, tools and rewards: use them by dotted path, or copy one to write your own.

Code that users configure or copy belongs here; it may use sessions, but not the rollout manager or engines.
"""
