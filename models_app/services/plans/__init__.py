"""Acts over several instances, step by step and undone when they fail; and the loops that keep what is wanted."""
