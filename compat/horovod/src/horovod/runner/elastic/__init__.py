"""Host discovery and host changes of elastic jobs."""
