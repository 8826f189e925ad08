"""Tests that need a GPU. They are skipped where there is none; `python -m tests.gpu` runs them as a proof."""
