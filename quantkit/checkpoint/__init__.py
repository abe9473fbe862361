"""Checkpoints on disk: reading, writing, their configs and what the engines accept.

header        the safetensors header: parse, check, write
source        a checkpoint opened for reading: config, index, every tensor's place
weights       stored tensors grouped into weights by dtype and siblings; all spellings of tensor names
inventory     the headers of a published model, made from its config alone
config        quantization_config, and how it gets into config.json
engines       how vLLM, SGLang and transformers match modules to the config's groups
digest        hashes of a checkpoint's files, and one of all that decides what the model says
writer        the output folder: temporary files, fsync, rename, index, seal
"""
