"""Published studies as rows that can be run again, and their runner."""
