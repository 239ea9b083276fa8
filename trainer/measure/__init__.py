"""Runs that measure a rank alone, collectives and links, instead of training."""
