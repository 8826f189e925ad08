"""Evaluation: answer the validation sets at a pinned weight version and estimate how good the answers are.

The evaluator, its schedule beside training and its statistics belong here. Its record, which others show, is
`observability.evaluation_record`.
"""
