"""Named errors of hosts, GPUs and readings. Plain Python."""

from __future__ import annotations


class ProbeError(Exception):
    """A reading could not be taken; the message says of what and why."""


class GpuGone(ProbeError):
    """A GPU that was there has stopped answering or has left the bus."""


class SegmentMissing(ProbeError):
    """There is no file of that name in /dev/shm."""


class SegmentInvalid(ProbeError):
    """A file in /dev/shm carries a segment's name but not a segment's content."""


class SegmentUnreadable(ProbeError):
    """The segment is there and may not be read (it belongs to another user)."""


class ImpossiblePolicy(ValueError):
    """A set of guarantees, reserves and weights that no card of this size can hold; the message has the numbers."""
