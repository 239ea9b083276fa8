"""The ranks as one group: identity, device, joining, ending."""
