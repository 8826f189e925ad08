"""Checkpoints: written beside training, whole or not there, for any layout; see docs/guide/recovering.md."""
