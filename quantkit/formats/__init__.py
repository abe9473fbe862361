"""The torch reference of every number format: pure functions, no I/O, no tensor names, no choice of device.

A function here is the definition of its format. The fast loops in `quantkit.kernels` are compared with it bit for bit;
`quantkit.ops` chooses between the two.
"""
