"""Segments of shared memory, which the coordinator alone makes and removes."""

import contextlib
import os
import secrets
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from quantkit.errors import HandoffError
from quantkit.runtime.handoff.messages import Ready
from quantkit.runtime.handoff.segment import size_of, write_tokens

_SHARED = Path("/dev/shm")  # where Linux has shared memory


def make_segment(prompt: Sequence[int], prefill: Ready) -> SharedMemory:
    """A segment for the hand-off of a prompt by such a worker, with the prompt in it and the memory behind it.

    Raises HandoffError if there is not enough.
    """
    name = f"quantkit-{os.getpid()}-{secrets.token_hex(4)}"  # says whose it is; macOS has room for 31 letters
    size = size_of(prefill.terms, prefill.spec, len(prompt))
    try:
        segment = SharedMemory(name, create=True, size=size)
        try:
            if _SHARED.is_dir():  # else a worker that writes beyond what there is gets SIGBUS
                with (_SHARED / segment.name).open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, segment.size)
            assert segment.buf is not None
            write_tokens(segment.buf, prefill.terms, prefill.spec, prompt)
        except BaseException:
            remove_segment(segment)
            raise
    except OSError as error:
        hint = "A prompt's pages must fit into shared memory: in a container, give it more with --shm-size."
        message = f"no shared memory for a prompt's pages: {error.strerror}"
        raise HandoffError(message, cause="memory", hint=hint) from error
    return segment


def remove_segment(segment: SharedMemory) -> None:
    """Remove a segment, if nobody else has: some systems remove all of a user who has logged out."""
    segment.close()
    with contextlib.suppress(FileNotFoundError):
        segment.unlink()
