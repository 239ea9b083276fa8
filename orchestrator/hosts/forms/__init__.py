"""Hosts in the forms of other tools: each is read into `Imported`, and written from our nodes."""
