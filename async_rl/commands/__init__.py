"""The commands of `async-rl`, a file a family; `async_rl/cli.py` holds the table of them."""
