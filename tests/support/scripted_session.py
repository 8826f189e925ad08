"""A session whose policy says what a test tells it to; it is part of the product, for users' tests."""

from agent_loops.testing import ScriptedSession, make_task

__all__ = ["ScriptedSession", "make_task"]
