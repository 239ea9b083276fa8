"""A collected run as other programs keep runs: TensorBoard, MLflow."""
