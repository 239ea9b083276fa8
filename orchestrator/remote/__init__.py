"""What runs on the hosts: each file stands alone, uses the standard library only and is shipped as it is."""
