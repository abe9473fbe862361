"""What can be wrong with a page, by name."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a check failed.

    wrong_page         the block table names another page than the request was given
    stale_page         the page was given back, or to another, since
    double_allocation  the page was given to another while it was the request's
    tag_mismatch       the page is the request's, and its tag or what is expected of it is not what was noted
    late_write         rows were to be written to a page that is no longer the writer's: refused
    content_mismatch   the page does not hold what was written to it, or holds it for other tokens or another place
    scale_mismatch     the KV scales are not those which the pages were written with
    hand_off_mismatch  pages from elsewhere do not hold what was put into them, or hold it for other tokens
    """

    WRONG_PAGE = "wrong_page"
    STALE_PAGE = "stale_page"
    DOUBLE_ALLOCATION = "double_allocation"
    TAG = "tag_mismatch"
    LATE_WRITE = "late_write"
    CONTENT = "content_mismatch"
    SCALE = "scale_mismatch"
    HAND_OFF = "hand_off_mismatch"
