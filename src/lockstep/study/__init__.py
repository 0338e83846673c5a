"""Studies: measurements of where a job's time goes. Each writes records, from which reports are drawn."""
