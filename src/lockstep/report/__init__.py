"""Reports: figures, tables and a page, from records alone; nothing here needs torch."""
