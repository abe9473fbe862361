"""The files of a checkpoint: reading, writing, and who is at work in a folder.

header        the safetensors header: parse, check, write
source        a checkpoint opened for reading: config, index, every tensor's place
config        how a quantization_config gets into config.json
manifest      quantkit.json
digest        hashes of a checkpoint's files, and one of all that decides what the model says
writer        the output folder: temporary files, fsync, rename, index, seal
output        whether a command may write to a folder, and the beginning of its run
occupancy     what lies in a folder already: whose run or output, and what is nobody's
journal       what an open run has finished, and whose it is
lock          one run at a time
"""
