"""`recipes`: which recipes are built in, what one says, and what each of its rules would do to a model.

check   the verbs
report  what they return; apart, so that the command line can show errors without them
"""
