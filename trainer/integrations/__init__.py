"""Callbacks for Lightning, Accelerate and Hugging Face's Trainer: what a framework knows of a run enters its records.

    from trainer.integrations.lightning import OrchCallback
    Trainer(callbacks=[OrchCallback()])

`orch run` measures the steps of any script from outside. A callback adds loss, epoch, exact samples and evaluations to
the same records; it writes none itself, so nothing is counted twice. Where nothing is measured (without orch, or with
`--no-metrics`) it does nothing. Each module imports its framework, and nothing of orch but what lies here.
"""
