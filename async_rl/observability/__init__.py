"""What a run reports about itself: metrics, records, diagnosis, live page, reports and trackers.

Declarations of metrics and everything that shows a run to people belongs here. Nothing here changes what a
run does, except the stall doctor's configured remedies.
"""
