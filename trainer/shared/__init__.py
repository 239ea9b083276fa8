"""What the trainer and the orchestrator both use: settings, experiments, shares, the form of metrics. Free of torch."""
