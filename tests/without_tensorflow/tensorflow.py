"""First on PYTHONPATH, stands for a TensorFlow that is not installed."""

raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
