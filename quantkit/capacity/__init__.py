"""What a model needs on GPUs, from the sizes of its tensors alone: memory, tokens that fit, and the best speed.

layouts    the choices of a KV cache
attention  bytes of a cached token, by layout; what attention reads and computes
resident   which bytes of a checkpoint lie on each rank
gpus       the table of GPUs
roofline   seconds of a decode and a prefill step, cost of a token
tables     reports as tables of text
report     what `plan` returns
"""
