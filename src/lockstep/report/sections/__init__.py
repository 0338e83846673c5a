"""Sections of the report, one a file: each makes charts and tables of what was read, or None where there is nothing."""
