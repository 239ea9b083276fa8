"""The channels of every layer cut over the ranks: each computes its own for the whole batch."""
