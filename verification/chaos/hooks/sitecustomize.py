"""Installs the chaos tests' middleware in each SGLang server of the run.

Python imports this module at the start of every process that has this folder in PYTHONPATH. It does nothing
in other processes than the servers, which the launcher's name in their command line identifies.
"""

import os
import sys

if "ASYNC_RL_CHAOS_FAULTS" in os.environ and any("cpu_launcher" in word for word in sys.orig_argv):
    from verification.chaos.engine_faults import install

    install()
