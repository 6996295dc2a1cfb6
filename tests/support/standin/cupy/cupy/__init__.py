"""A stand-in of cupy, beside that of CUDA's driver: its compiler, for the one source of this project."""

import sys
import warnings

# As the real one may when it is imported: that must fail no test of GPUs.
if "pytest" in sys.modules:
    warnings.warn("this stand-in of cupy will change", FutureWarning, stacklevel=1)
