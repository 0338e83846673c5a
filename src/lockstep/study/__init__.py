"""Measure where a job's time goes, and write records for reports."""
