"""How long a step will take: the pure model, its inputs, and which way to run is the fastest."""
