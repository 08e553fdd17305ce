"""Who gets which memory, decided by pure functions: readings and rules in, plans out. Plain Python, no clock, no I/O.

``placement`` chooses GPUs for a launch, ``fit`` says what a launch needs and whether it fits, ``rebalance`` divides KV
memory among the instances of one GPU, ``make_room`` finds the least harmful way to free bytes, ``claims`` refuses
impossible sets of guarantees. All bytes are per GPU; all times are epoch seconds given by the caller.
"""

from __future__ import annotations
