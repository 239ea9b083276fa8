"""Training with the network cut over hosts: each holds some of its blocks, and activations cross the links."""
