"""A record of everything that quantkit makes, so that a change of any output is a line in a diff.

recording  how outputs become lines
cases      which sources, conversions and commands
speed      ratios of the benchmarks and CPU time of the program, which digests do not see
"""
