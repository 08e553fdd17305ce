"""How bad a fault of a card is: the errors that NVML gives, and the XIDs that the driver reports.

XIDs are graded by the *immediate action* of NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors, Ampere and
newer). What asks for a reset or a restart of the machine condemns the card; what asks for the program to be started
again, or for nothing, is the fault of a program and says nothing of the card, apart from a few that are worth showing.
"""

from __future__ import annotations

from enum import StrEnum


class Grade(StrEnum):
    """What follows from a fault. PASSING: shown for a while. BLIND: the driver tells nothing of the card, engines on it
    may serve on. FATAL: out of order until it is reset or the machine restarted."""

    NONE = ""
    PASSING = "passing"
    BLIND = "blind"
    FATAL = "fatal"


_RESET = "The card has to be reset, or the machine restarted."
_RESTART = "The machine has to be restarted."

#: Catalogue: RESET_GPU, RESTART_BM, RESTART_VM, CHECK_MECHANICALS, and the workflows that end in one of them.
FATAL_XIDS = {
    46: ("the GPU stopped processing", _RESET),
    48: ("a memory error that could not be corrected", _RESET),
    54: ("its auxiliary power is not connected", "Look at its power cables."),
    62: ("the card's internal controller stopped", _RESET),
    64: ("a faulty memory row could not be replaced", _RESET),
    74: ("an NVLink error", _RESET),
    79: ("the GPU has fallen off the bus", _RESTART),
    95: ("a memory error that reached other programs", _RESET),
    109: ("a switch between programs took too long", _RESET),
    110: ("a security fault", _RESET),
    119: ("the GPU's system processor does not answer", _RESET),
    120: ("the GPU's system processor failed", _RESET),
    136: ("an NVLink could not be trained", _RESET),
    140: ("a memory error that was not corrected", _RESET),
    143: ("the GPU could not be set up", _RESET),
    151: ("a key could not be renewed", _RESTART),
    155: ("an NVLink error that software reported", _RESET),
    156: ("a part of the card was retired, which needs a reset", _RESET),
    158: ("a time limit inside the card that it does not recover from", _RESET),
}
#: Catalogue: RESTART_APP or IGNORE, or a reading that NVML does not give us; worth knowing of, and the card goes on.
PASSING_XIDS = {
    63: "a faulty memory row is to be replaced at the next reset",
    92: "many corrected memory errors",
    94: "a memory error that hit one program",
    **dict.fromkeys(range(144, 151), "an NVLink error; the kernel's log tells which"),
    154: "the driver asks for another recovery action; the kernel's log tells which",
    157: "a part of the card could not be retired",
    171: "an uncorrected memory error",
    172: "an uncorrected error of on-chip memory",
}


def grade_of(xid: int) -> Grade:
    """NONE for the XIDs that are a program's own fault (13, 31, 43, 45, 69 …), and for those that are not known."""
    if xid in FATAL_XIDS:
        return Grade.FATAL
    return Grade.PASSING if xid in PASSING_XIDS else Grade.NONE


def sentence_of(xid: int) -> str:
    """What an XID means and what to do about it; empty for one that says nothing of the card."""
    if xid in FATAL_XIDS:
        what, advice = FATAL_XIDS[xid]
        return f"XID {xid}: {what}. {advice}"
    return f"XID {xid}: {PASSING_XIDS[xid]}." if xid in PASSING_XIDS else ""
