"""`orch ui`: a web page of the cluster and its jobs, for one user, only on this machine."""
