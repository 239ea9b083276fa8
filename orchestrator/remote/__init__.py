"""What runs on the hosts. A package of its own: standard library and its own siblings only, shipped as it is.

Short programs (`probe`, `prepare`, `control`, `reader`) travel on standard input with every request: `loader` makes the
package importable there without installing it. Long-lived ones (`supervisor`, `rank`, `gpus`) are written into the
job's folder.
"""
