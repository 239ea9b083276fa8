"""Programs that run on the hosts: standard library and modules of this package only, shipped as they are.

Short programs (`probe`, `prepare`, `control`, `reader`) are sent on standard input with every request; `loader` makes
the package importable there. Long-lived programs (`supervisor`, `rank`, `gpus`) are written into the job's folder.
"""
