"""Property tests look for counterexamples, not for speed: a loaded machine must not fail them."""

from hypothesis import settings

settings.register_profile("async_rl", deadline=None)
settings.load_profile("async_rl")
