"""Turns a job's specification into a launch plan: settings, shipped files, environment and shares as one value."""
