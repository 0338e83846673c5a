"""Small helpers that other programs import."""
