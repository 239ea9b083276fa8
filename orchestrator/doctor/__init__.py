"""Diagnoses a cluster before it fails: checks of hosts, of all hosts together and of each pair (`orch doctor`)."""
