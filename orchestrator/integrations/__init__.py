"""Makes orch usable from other programs: TorchX."""
