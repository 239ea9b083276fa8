"""What one rank computes: the network, its arithmetic and precision, CUDA graphs."""
