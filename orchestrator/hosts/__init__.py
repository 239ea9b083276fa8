"""Describes hosts: the inventory, probed facts, their meaning for a job, and the election of the master."""
