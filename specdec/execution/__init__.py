"""Forward passes of the target: runner, CUDA graphs and timing."""
