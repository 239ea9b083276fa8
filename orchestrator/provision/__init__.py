"""What hosts are given on request, before any job: a data set, an environment with torch."""
