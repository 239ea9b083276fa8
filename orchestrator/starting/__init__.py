"""How a job begins on a cluster: which of its hosts take part, who of them does what."""
