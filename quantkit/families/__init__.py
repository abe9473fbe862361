"""What a model is, from its config.json.

locate     from an alias, a repository or a folder to a source
inventory  the headers of a published model, made from its config alone
storage    how a config says that linear layers are stored
vision     the tensors of a vision tower
"""
