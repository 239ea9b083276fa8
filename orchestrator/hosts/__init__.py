"""What hosts are: the inventory, what a probe finds on them, what that means for a job, and who is the master."""
