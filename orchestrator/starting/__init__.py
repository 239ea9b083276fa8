"""How a job begins on a cluster, also once more: which of its hosts take part, who of them does what."""
