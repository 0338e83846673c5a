"""Reports (figures, tables and an HTML page) from run and study records, and a live view, `watch`. Without torch."""
