"""Ranks that keep a GPU's time without computing."""
