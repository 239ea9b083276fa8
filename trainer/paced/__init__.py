"""Ranks that simulate a GPU's speed."""
