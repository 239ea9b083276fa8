"""How a job starts, and is retried, on a cluster: host choice, plan, carried-over files."""
