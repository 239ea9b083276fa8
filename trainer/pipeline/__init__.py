"""Pipeline parallelism: each host holds some of the network's blocks, and activations cross the links."""
