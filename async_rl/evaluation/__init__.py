"""Evaluation: answers the validation sets at a pinned weight version and estimates the quality of the
answers.

The evaluator, its schedule beside training and its statistics belong here. Its record, which other packages
show, is `observability.evaluation_record`.
"""
