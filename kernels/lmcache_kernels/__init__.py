"""The CUDA kernel of this project and its launcher. They need neither torch nor vLLM."""
