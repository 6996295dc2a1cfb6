"""CUDA source of this project and what launches it. Neither torch nor vLLM is needed."""
