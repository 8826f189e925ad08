"""`python -m async_rl.cli COMMAND` does what `async-rl COMMAND` does."""

import sys

from async_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
