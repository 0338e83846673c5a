"""A live view of a run in the terminal, out of what the run writes; nothing is asked of the run itself."""
