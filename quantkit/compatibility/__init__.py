"""`engines`: which rules of vLLM, SGLang and transformers a checkpoint keeps.

check   a checkpoint held against the rules, which are in `checkpoint/engines`
report  what that returns; apart, so that the command line can show errors without it
"""
