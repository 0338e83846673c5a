"""A live view of a run in the terminal, drawn from the run's files without contacting the run."""
