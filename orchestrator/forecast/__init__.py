"""Prediction of step times: the model, its inputs, and the fastest way to run a job."""
