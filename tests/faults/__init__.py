"""Random interleavings of everything an operator does and of kill -9 of anything of ours, under a whole Sardeenz."""
