"""Figures of a run, computed from its collected folder."""
