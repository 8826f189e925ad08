"""The commands of `async-rl`, one file per family; `cli.main` holds the table of them.

Arguments and help texts belong here, and nothing heavy: all files are imported to print `--help`, and each
command imports what it needs when it runs.
"""
