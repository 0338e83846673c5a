"""Reports (figures, tables and an HTML page) from run and study records; nothing here imports torch."""
