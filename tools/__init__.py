"""What make, tests and benchmarks need beside the five scripts: the demo's model, wheels for offline machines, tiny
inputs, warm starts and kills."""
