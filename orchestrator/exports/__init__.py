"""Exports collected runs to other programs: TensorBoard, MLflow."""
