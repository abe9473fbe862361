"""A record of everything that quantkit makes, so that a change of any output is a line in a diff.

recording  how outputs become lines
cases      which sources, conversions and commands
files      where the lines are kept
speed      ratios of the benchmarks and core seconds of commands, which digests do not see
"""
