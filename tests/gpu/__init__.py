"""What needs a GPU. Collected everywhere, skipped where there is none; `python -m tests.gpu` is the proof."""
