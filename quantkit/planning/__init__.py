"""`plan`: will a model fit on these GPUs, how fast can it be at best, and which weights serve which phase.

fit           sizes, caches and rooflines of one weight format
resident      bytes of the weights that a rank holds
gpus          the table of GPUs
roofline      the shortest time that a step can take
published     the figures that others have published, beside our own
phases        formats weighed, pools with their checkpoints, and the engines' command lines
weighing      which of two formats is better in which phase
launch        the command lines, and the pairs of pools that an engine refuses
deployment    the deployment that is written to a file
fingerprint   what tells one checkpoint from another
drift         are these the checkpoints of that deployment
report        what a plan of one format returns
phase_report  what phase plans and drift return
"""
