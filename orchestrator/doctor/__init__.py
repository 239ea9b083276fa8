"""What may fail before it fails: every check of hosts, of all of them together and of each pair (`orch doctor`)."""
