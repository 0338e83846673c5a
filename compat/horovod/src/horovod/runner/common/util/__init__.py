"""Helpers that other programs import."""
