"""Open files that connections need, allowed before anything heavy is imported."""

from __future__ import annotations

BACKLOG = 128
"""Connections that wait to be accepted; so many may come beyond the limit before one is closed."""

OTHERS = 256
"""Open files of the server beside connections: weights, databases, pipes of children."""


class TooFewDescriptors(OSError):
    """The system allows fewer open files than the setting of connections needs; the message has both numbers."""


def allow_descriptors(connections: int) -> None:
    """Raise this process's limit of open files to what so many connections need, as far as the system lets it.

    Raises:
        TooFewDescriptors: when they are more than the system lets it have.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = connections + BACKLOG + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            most = hard - BACKLOG - OTHERS
            lower = f"set it to at most {most}, or raise the limit" if most > 0 else "raise the limit"
            raise TooFewDescriptors(
                f"ROPEWAY_MAX_CONNECTIONS={connections} needs {needed} open files and the system allows {hard}: "
                f"{lower} (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
