"""What a model is, from its config.json.

family     the families, and what the models of each have in common
locate     from an alias, a repository or a folder to a source
inventory  the headers of a published model, made from its config alone
storage    how a config says that linear layers are stored
keys       the keys of a config, with errors that name them
config     what decides the computation
attention  what a model keeps of every token
vision     the tensors of a vision tower
"""
