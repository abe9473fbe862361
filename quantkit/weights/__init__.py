"""Stored tensors as the weights of a model.

weight               a weight, and the tensors that hold it
encodings            every way in which a weight is stored, one object each
grouping             stored tensors become weights, by dtype and siblings
experts              experts that are stored in one tensor, taken apart
rows                 rows of a weight, read in pieces of bounded memory
packed               a weight in the runtime, as torch's tensors
rescale              powers of two multiplied into stored weights
quantization_config  what a config says of any assignment of formats to modules
config_groups        which config group a module gets
identity             which model a checkpoint holds, whatever its form
"""
