"""The loop that looks at one host every second: probe, record, publish, roll up.

``observer`` takes the readings and makes the record (plain Python), ``publisher`` hands it to Redis and the pages,
``rollups`` averages it, ``recorder`` does everything that touches the database, in a thread of its own so that a
database that is away or slow never holds up a reading, ``loop`` keeps time.
"""

from __future__ import annotations
