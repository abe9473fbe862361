"""A Hub on loopback that the real client talks to: `server` gives files, `uploads` takes them, too.

`pulling` and `pushing` are what tests of the two directions share.
"""
