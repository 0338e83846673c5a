"""Sections of the report. Each `build` returns charts and tables, or None if there are no records."""
