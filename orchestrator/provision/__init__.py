"""Prepares hosts on request, before any job: data sets (`data push`) and Python environments (`setup`)."""
