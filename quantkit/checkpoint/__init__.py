"""Checkpoints on disk: reading, writing, their configs and what the engines accept.

header        the safetensors header: parse, check, write
source        a checkpoint opened for reading: config, index, every tensor's place
weights       stored tensors grouped into weights by dtype and siblings
manifest      quantkit.json
identity      which model a checkpoint holds, whatever its form
spelling      how the dialects spell a weight in tensors
experts       experts that are stored in one tensor, taken apart
inventory     the headers of a published model, made from its config alone
description   what a quantization_config says of any assignment of formats to modules
config        how that gets into config.json
engines       what vLLM, SGLang and transformers accept
digest        hashes of a checkpoint's files, and one of all that decides what the model says
writer        the output folder: temporary files, fsync, rename, index, seal
output        whether a command may write to a folder, and the beginning of its run
occupancy     what lies in a folder already: whose run or output, and what is nobody's
journal       what an open run has finished, and whose it is
lock          one run at a time
"""
