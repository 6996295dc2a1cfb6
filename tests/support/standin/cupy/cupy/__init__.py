"""A stand-in of cupy, beside that of CUDA's driver: its compiler, for the one source of this project."""
