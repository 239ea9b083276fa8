"""One run's parts and its progress; its records, what it prints, and the network that an evaluation sees."""
