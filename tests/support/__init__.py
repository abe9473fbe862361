"""What tests share: makers of checkpoints, readers that share no code with quantkit, worlds that tests explore.

A module stands here once two test files need it; fixtures that it defines are known to all tests by `conftest.py`.
"""
