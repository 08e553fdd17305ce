"""One instance from launch to its end, by short steps that may be lost or doubled; and the host under it."""
