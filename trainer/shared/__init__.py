"""Settings, experiments, shares and metrics, for trainer and orchestrator. No torch."""
