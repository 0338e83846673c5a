"""Sections of the report, one per file. Each `build` returns charts and tables, or None if there are no records."""
