"""What elastic jobs tell their workers."""
