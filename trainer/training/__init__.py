"""A run's parts, progress, records, console and shared network."""
