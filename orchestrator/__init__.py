"""`orch`: one cluster out of a rack of odd GPU hosts that are reached only by SSH."""

__version__ = "0.1.0"
