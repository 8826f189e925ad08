"""Mutants: each replaces one named function by one that breaks a promise of CONTRIBUTING.md.

It names the tests that must fail.

```
 python -m verification.mutants ─► a process for each mutant: pytest -p verification.mutants.plugin TESTS
                                      │ the plugin replaces the function before tests are collected
                                      └► a test fails, and passes without the mutant: killed
```

A mutant names functions and tests, no lines: it survives any change that keeps the function's meaning. A
mutant whose function is gone, or was never called, is an error. To add one, add a function to `table.py`.
"""
