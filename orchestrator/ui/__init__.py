"""`orch ui`: a page of the cluster and its jobs, for one person, on this machine alone."""
