"""Stored tensors as the weights of a model.

weight               stored tensors grouped into weights by dtype and siblings
experts              experts that are stored in one tensor, taken apart
layout               how the dialects spell a weight in tensors
rows                 rows of a weight, read in pieces of bounded memory
rescale              powers of two multiplied into stored weights
quantization_config  what a config says of any assignment of formats to modules
config_groups        which config group a module gets
identity             which model a checkpoint holds, whatever its form
"""
