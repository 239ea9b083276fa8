"""Slurm lends hosts: its answers, the text of a batch job, and the login host's commands."""

from __future__ import annotations
